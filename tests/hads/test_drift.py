"""Drift: the same texts keep the promise exactly, others are weighed by the plan's own rules."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.rule import take_rows
from tests.hads.sample import POOLED
from tests.hads.sample import profile as made_up
from xsake import hads
from xsake.errors import ArgumentError
from xsake.hads import drift
from xsake.hads.budget import ForcedBlocks, level_totals
from xsake.hads.curves import correct_estimates
from xsake.hads.hooks import ComponentMoments, LayerMasses, moments_hook
from xsake.hads.plan import SparsityPlan
from xsake.hads.policies import KL, Static
from xsake.hads.selectors import Sampled

BLOCK, LAYERS, HEADS = 16, 2, 3
SELECTOR = Sampled(dims=4)
MODEL = hads.CalibratedModel(
    name="toy", digest="0", layers=LAYERS, q_heads=HEADS, kv_heads=1, head_dim=8
)


def observe(tokens, watch):
    """A model whose heads look at what the tokens say, and a selector that half knows it."""
    rng = np.random.default_rng(int(np.asarray(tokens, np.int64).sum()))
    if watch is moments_hook:
        return ComponentMoments(*rng.uniform(1, 2, (2, LAYERS, 1, 1, 8)))
    n = tokens.shape[1] // BLOCK
    weights = np.tril(rng.gamma(0.3, size=(LAYERS, 1, HEADS, n, n)) + 1e-3)
    noisy = np.tril(weights * rng.uniform(0.2, 2, weights.shape))
    true, estimate = (x / x.sum(-1, keepdims=True) for x in (weights, noisy))
    entropy = rng.uniform(0, 5, (LAYERS, 1, HEADS))
    return LayerMasses(entropy, true.astype(np.float32), {"sampled": estimate.astype(np.float32)})


def readings(count: int, seed: int, tokens: int = 128) -> list[hads.CalibrationDocument]:
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(0, 64, tokens).astype(np.int32)
    return [hads.CalibrationDocument(f"text#{i}", draw()) for i in range(count)]


@functools.cache
def calibrated() -> hads.Profile:
    settings = hads.CalibrationSettings(block=BLOCK, selectors=(SELECTOR,))
    return hads.calibrate(observe, MODEL, readings(2, seed=0), settings)


def plan(policy: str = "kl", budget: float | None = 0.8, **settings) -> SparsityPlan:
    return hads.make_plan(calibrated(), hads.make_policy(policy, **settings), budget, SELECTOR)


@functools.cache
def measured() -> tuple:
    return tuple(drift.measure_documents(observe, plan(), readings(2, seed=0)))


def test_the_texts_of_the_calibration_keep_its_promise():
    now, count = drift.mean_loss(plan(), measured())
    promised = drift.calibrated_loss(plan(), calibrated())
    assert count == 2 and np.isfinite(now).all() and now.min() > 0
    np.testing.assert_allclose(now, promised, rtol=1e-4, atol=1e-6)
    assert drift.Drift(promised, now, count).fits


def test_blocks_are_those_that_the_plan_would_choose_row_by_row():
    chosen = plan("top_p", None, p=0.97)  # whole levels: every row has the same number of blocks
    now, _ = drift.mean_loss(chosen, measured())
    expected = np.zeros(6)
    for document in measured():
        order = correct_estimates(document.estimates["sampled"], chosen.weights.reshape(6, -1))
        grid = take_rows(order, chosen.row_counts(8).reshape(6, 8), chosen.forced)
        kept = np.where(grid, document.true, 0).sum(-1)
        expected += -np.log(np.minimum(kept, 1)).mean(-1) / 2
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(now.ravel(), expected, rtol=1e-5, atol=1e-7)


def test_estimates_are_made_with_the_selector_and_components_of_the_plan(monkeypatch):
    asked = []
    monkeypatch.setattr(drift, "make_mass_hook", lambda *look: asked.append(look))
    list(drift.measure_documents(observe, plan(), readings(2, seed=5)))
    ((block, selectors, components),) = asked
    assert (block, selectors) == (BLOCK, (SELECTOR,))
    np.testing.assert_array_equal(components, calibrated().components)


def test_another_length_is_weighed_at_the_totals_of_that_length():
    now, _ = drift.mean_loss(plan(), drift.measure_documents(observe, plan(), readings(1, 3, 96)))
    assert now.shape == (2, 3) and np.isfinite(now).all()
    with pytest.raises(ArgumentError, match="XSK-102.calibration-too-short"):
        list(drift.measure_documents(observe, plan(), readings(1, 3, 48)))


def test_every_document_is_told_to_who_watches():
    told = []
    list(drift.measure_documents(observe, plan(), readings(2, seed=0), on_progress=told.append))
    assert [(step.done, step.total, step.label) for step in told] == [
        (1, 2, "text#0"),
        (2, 2, "text#1"),
    ]


@given(seed=st.integers(0, 10**6), part=st.floats(0, 1), level=st.integers(3, 7))
def test_losses_are_straight_between_levels(seed, part, level):
    curves = made_up(seed=seed).curves["pooled"]
    low, high = level_totals(np.array([level, level + 1]), 8, ForcedBlocks())
    total = round(low + part * (high - low))
    share = (total - low) / max(high - low, 1)
    expected = curves[..., level] * (1 - share) + curves[..., level + 1] * share
    found = drift.loss_at(curves, np.full((2, 3), total), ForcedBlocks())
    np.testing.assert_allclose(found, expected, atol=1e-12)


def kls(*numbers: float) -> np.ndarray:
    return np.array([numbers])


@pytest.mark.parametrize(
    ("promised", "now", "lost"),
    [
        (kls(0.1, 0.1), kls(0.31, 0.1), ((0, 0),)),
        (kls(0.1, 0.1), kls(0.1, 0.19), ()),  # within twice
        (kls(0.01, 0.1), kls(0.1, 0.1), ()),  # ten times, but of next to nothing
        (kls(0.1, 0.1), kls(0.5, 0.9), ((0, 1), (0, 0))),  # worst first
    ],
)
def test_a_head_is_lost_beyond_twice_and_a_tenth_of_a_nat(promised, now, lost):
    assert drift.Drift(promised, now, 1).drifted_heads == lost


def test_a_plan_fits_while_mean_and_single_heads_do():
    promised = np.full((4, 10), 0.1)
    assert drift.Drift(promised, promised * 1.5, 2).fits
    assert not drift.Drift(promised, promised * 1.51, 2).fits
    few, many = promised.copy(), promised.copy()
    few[0, :2], many[0, :3] = 0.3, 0.3
    assert drift.Drift(promised, few, 2).fits
    assert not drift.Drift(promised, many, 2).fits


def test_the_sentence_has_the_means_and_the_lost_heads():
    promised, now = np.full((4, 10), 0.1), np.full((4, 10), 0.1)
    now[2] = np.linspace(0.3, 1.2, 10)
    now[3, 0] = 0.4
    told = str(drift.Drift(promised, now, 2))
    assert told.startswith("The plan does not fit: mean KL 0.2700 nats on 2 documents, 0.1000 cal")
    assert "11 of 40 heads drifted: L2H9 (0.100 -> 1.200)" in told and told.endswith("1 more.")
    figures = drift.Drift(promised, now, 2).to_dict()
    assert figures["fits"] is False and figures["lost"][0] == [2, 9]
    assert figures["mean_kl"] == 0.27 and np.shape(figures["kl"]) == (4, 10)


def test_what_was_not_promised_is_refused():
    profile = made_up()
    dynamic = SparsityPlan.of(profile, KL(), 0.8, selector=POOLED)
    static = SparsityPlan.of(profile, Static(), 0.8)
    assert drift.calibrated_loss(dynamic, profile).shape == (2, 3)
    with pytest.raises(ArgumentError, match="XSK-102.drift-profile"):
        drift.calibrated_loss(dynamic, made_up(seed=1))
    with pytest.raises(ArgumentError, match="XSK-102.drift-selector"):
        drift.calibrated_loss(static, profile)
