"""Calibration measures what it says, and neither order, interruption nor devices change it."""

import dataclasses

import jax
import numpy as np
import pytest

from xsake import hads
from xsake.errors import ArgumentError
from xsake.hads import curves
from xsake.hads.selectors import Pooled, Sampled

LAYERS, HEADS, DIM, VOCABULARY = 2, 2, 8, 32
MODEL = hads.CalibratedModel(
    name="toy", digest="0", layers=LAYERS, q_heads=HEADS, kv_heads=1, head_dim=DIM
)
SETTINGS = hads.CalibrationSettings(block=8, selectors=(Sampled(2, 4), Pooled()))


def toy(params, tokens, attention):
    x = params[tokens]
    for layer in range(LAYERS):
        q = (1 + layer) * x[:, :, None, :].repeat(HEADS, 2) * np.array([[[[1], [3]]]])
        x = x + attention(q, x[:, :, None], x[:, :, None]).mean(2)


@pytest.fixture(scope="module")
def observe():
    return hads.observer(toy, jax.random.normal(jax.random.key(0), (VOCABULARY, DIM)))


@pytest.fixture(scope="module")
def readings():
    draw = np.random.default_rng(0).integers(0, VOCABULARY, (3, 64))
    return [
        hads.CalibrationDocument(f"text {i}", row.astype(np.int32)) for i, row in enumerate(draw)
    ]


@pytest.fixture(scope="module")
def calibrate(observe, readings):
    def run(documents=readings, settings=SETTINGS, **keywords):
        return hads.calibrate(observe, MODEL, documents, settings, **keywords)

    return run


@pytest.fixture(scope="module")
def profile(calibrate):
    return calibrate()


def test_a_profile_says_what_was_measured(profile):
    assert [document.tokens for document in profile.documents] == [64] * 3
    assert set(profile.curves) == {"oracle", "sampled", "pooled"}
    assert (profile.entropy[:, 1] < profile.entropy[:, 0]).all(), "the sharper head"
    for name in ("sampled", "pooled"):
        gap = profile.curves[name] - profile.curves["oracle"]
        assert gap.min() > -1e-5 and gap[..., 4:7].max() > 0


@pytest.mark.slow  # one more calibration
def test_the_order_of_documents_changes_nothing(profile, calibrate, readings):
    assert calibrate(readings[::-1]).digest == profile.digest


def test_a_run_that_was_stopped_goes_on(profile, calibrate, tmp_path):
    def stop_after_one(progress):
        if progress.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(cache=hads.MassCache(tmp_path), on_progress=stop_after_one)
    seen = []
    again = calibrate(cache=hads.MassCache(tmp_path), on_progress=seen.append)
    assert [(progress.done, progress.is_new) for progress in seen] == [
        (1, False), (2, True), (3, True)
    ]  # fmt: skip
    assert again.digest == profile.digest


def test_a_damaged_file_is_measured_again(profile, calibrate, tmp_path):
    calibrate(cache=hads.MassCache(tmp_path))
    next(tmp_path.iterdir()).write_bytes(b"half of it")
    assert calibrate(cache=hads.MassCache(tmp_path)).digest == profile.digest


@pytest.mark.slow  # one more calibration
def test_documents_side_by_side_give_the_same_profile(profile, calibrate):
    found = calibrate(settings=dataclasses.replace(SETTINGS, batch_size=2))
    assert np.allclose(found.curves["sampled"], profile.curves["sampled"], atol=2e-3)


def test_documents_of_other_lengths_or_too_short_are_refused(calibrate, readings):
    longer = hads.CalibrationDocument("longer", np.zeros(72, np.int32))
    with pytest.raises(ArgumentError, match="XSK-102.calibration-lengths"):
        calibrate([*readings, longer])
    with pytest.raises(ArgumentError, match="XSK-102.calibration-too-short"):
        calibrate(settings=dataclasses.replace(SETTINGS, block=32))
    with pytest.raises(ArgumentError, match="XSK-102.calibration-duplicate"):
        calibrate([readings[0], readings[0]])


def test_a_curve_is_what_its_choice_keeps():
    forced, n = hads.ForcedBlocks(), 8
    random = np.random.default_rng(1)
    true = np.tri(n) * random.random((2, n, n))
    true /= true.sum(-1, keepdims=True)
    order = random.random((2, n, n))
    found = curves.loss_curve(true, order, forced)
    for k in range(n + 1):
        losses = []
        for row in range(n):
            kept = set(np.flatnonzero(forced.grid(n)[row]).tolist())
            rest = [j for j in range(row + 1) if j not in kept]
            best = sorted(rest, key=lambda j, row=row: -order[0, row, j])
            kept |= set(best[: max(0, k - len(kept))])
            losses.append(-np.log(true[0, row, sorted(kept)].sum()))
        assert found[0, k] == pytest.approx(np.mean(losses), abs=1e-6)


def test_corrections_find_the_weights_that_made_the_masses():
    forced, n = hads.ForcedBlocks(), 16
    random = np.random.default_rng(2)
    estimate = (np.tri(n) * random.random((1, n, n))).astype(np.float32)
    weights = np.array([[0.6, 0.3, 0.2]])
    true = curves.correct_estimates(estimate, weights)
    assert np.allclose(curves.fit_correction([(true, estimate)], forced), weights, atol=1e-3)
