"""Rules that learn from calibration scenes: what they learn, and what they refuse to guess."""

import dataclasses

import numpy as np
import pytest

from benchmarks.baselines import RULES, LayerSample
from benchmarks.baselines.calibrated import EqualCoverage, HeadCurves, Sparge
from benchmarks.baselines.estimators import POOLED, MassEstimator
from benchmarks.baselines.rule import causal_grid, forced_grid
from benchmarks.baselines.static_patterns import EntropyShares
from benchmarks.baselines.vertical_slash import PATTERNS, Minference
from tests.baselines.samples import (
    BLOCK,
    BLOCKS,
    HEADS,
    NEW,
    SCALE,
    WATCHED,
    calibrated,
    quiet,
    scene_of,
)
from xsake.errors import ArgumentError


@pytest.mark.parametrize("name", ["xattention_8", "sparge", "ada_kv", "minference"])
def test_a_rule_that_learns_refuses_to_rank_before(name):
    with pytest.raises(ArgumentError, match="finish"):
        RULES[name]().rank(NEW[0])
    with pytest.raises(ArgumentError, match="true masses"):
        RULES[name]().observe(dataclasses.replace(NEW[0], masses=None))
    with pytest.raises(ArgumentError, match="layer"):
        calibrated(name).rank(dataclasses.replace(NEW[0], layer=7))


@pytest.mark.parametrize("name", ["entropy_original", "entropy_original_literal"])
def test_shares_need_entropies(name):
    with pytest.raises(ArgumentError, match="entropy"):
        RULES[name]().observe(dataclasses.replace(NEW[0], entropy=None))
    with pytest.raises(ArgumentError, match="calibrated"):
        RULES[name]().shares(0)


def test_curves_rise_and_tell_heads_apart():
    curves, x = HeadCurves(), np.geomspace(1e-5, 1, 2000)
    noise = np.random.default_rng(0).uniform(0.5, 1.5, (2, 2000))
    curves.add(0, np.stack([x, x]), np.stack([x, x**2]) * noise)
    curves.finish()
    points = np.geomspace(1e-5, 1, 300)
    linear, square = curves(0, np.stack([points, points]))
    assert (np.diff(linear) > 0).all() and (np.diff(square) > 0).all()
    np.testing.assert_allclose(linear[50:250], points[50:250], rtol=0.25)
    np.testing.assert_allclose(square[50:250], points[50:250] ** 2, rtol=0.25)


def test_a_head_that_never_had_a_choice_keeps_the_order_of_its_estimate():
    curves = HeadCurves()
    curves.add(0, np.ones((1, 4)), np.ones((1, 4)), np.zeros((1, 4), bool))
    curves.finish()
    assert (np.diff(curves(0, np.array([[0.1, 0.2, 0.9]]))) > 0).all()


def test_one_level_leaves_the_same_true_mass_in_every_head():
    """The second head's estimate is far too flat, so the same threshold would keep far more."""
    random = np.random.default_rng(0)
    blocks = 64
    truth = (random.exponential(size=(1, blocks, blocks)) ** 4 * causal_grid(blocks)).repeat(2, 0)
    truth /= truth.sum(axis=-1, keepdims=True)
    flat = truth**0.3
    estimate = np.stack([truth[0], flat[1] / flat[1].sum(axis=-1, keepdims=True)])
    sample = LayerSample(
        q=np.zeros((blocks, 2, 1)), k=np.zeros((blocks, 1, 1)), scale=1.0, block=1, layer=0,
        masses=truth,
    )  # fmt: skip
    rule = EqualCoverage("any", MassEstimator(lambda _: estimate, POOLED.cost))
    rule.observe(sample)
    rule.finish()
    priority = rule.rank(sample).priority
    for level in (0.05, 0.1, 0.2):
        lost = np.where(priority > level, 0, truth).sum(axis=-1)[:, 16:].mean(axis=-1)
        np.testing.assert_allclose(lost[0], lost[1], rtol=0.1)
        kept = (priority > level).sum(axis=(1, 2))
        assert abs(kept[0] - kept[1]) < 0.05 * kept[0]


def test_ada_kv_turns_estimates_into_mean_true_masses():
    rule = calibrated("ada_kv")
    is_choice = causal_grid(BLOCKS) & ~forced_grid(BLOCKS)
    layer = [sample for sample in WATCHED if sample.layer == 0]
    found = np.mean([rule.rank(sample).priority[:, is_choice] for sample in layer], axis=0)
    truth = np.mean([np.asarray(sample.masses)[:, is_choice] for sample in layer], axis=0)
    np.testing.assert_allclose(found.mean(axis=-1), truth.mean(axis=-1), rtol=0.25)


def test_sparge_takes_blocks_that_resemble_nothing_first():
    q, k = quiet()
    q[..., 1], k[..., 1] = 1, 1  # so that every block resembles its mean
    sample = scene_of(q, k)
    k[5 * BLOCK : 6 * BLOCK] *= np.where(np.arange(BLOCK) % 2, -1, 1)[:, None, None]
    q[9 * BLOCK : 10 * BLOCK] *= np.where(np.arange(BLOCK) % 2, -1, 1)[:, None, None]
    planted = scene_of(q, k)
    rule = Sparge()
    rule.observe(sample)
    rule.observe(planted)
    rule.finish()
    priority = rule.rank(planted).priority[0]
    is_choice = causal_grid(BLOCKS) & ~forced_grid(BLOCKS)
    unlike = np.zeros((BLOCKS, BLOCKS), bool)
    unlike[9], unlike[:, 5] = True, True
    assert priority[is_choice & unlike].min() >= 1 >= priority[is_choice & ~unlike].max()
    assert rule.rank(sample).priority[0][is_choice].max() < 1


def test_minference_gives_each_head_the_pattern_that_it_has():
    q, k = quiet()
    q[:, :2, 0], k[4 * BLOCK + 3, :, 0], k[2 * BLOCK + 1, :, 0] = 3, 9, 9
    random = np.random.default_rng(0)
    likes = random.normal(size=(BLOCKS, 12))
    k[:, 1, 2:14] = np.repeat(likes, BLOCK, axis=0)
    q[:, 2:, 2:14] = 4 * np.repeat(likes[random.permutation(BLOCKS)], BLOCK, axis=0)[:, None]
    rule = Minference(budget=0.4)
    rule.observe(scene_of(q, k))
    rule.finish()
    kinds = [PATTERNS[kind] for kind in rule.kinds[0]]
    assert kinds[0] in ("vertical_slash", "columns") and kinds[2] == "blocks"
    sizes = (8192, 32, 64)
    costs = [RULES[name]().cost(*sizes) for name in ("pooled_top_k", "vertical_slash")]
    assert costs[0] < rule.cost(*sizes) < costs[1]
    assert rule.rank(scene_of(q, k)).priority.shape == (HEADS, BLOCKS, BLOCKS)


def test_shares_run_from_a_tenth_to_nine_tenths_over_the_whole_model():
    rule, literal = EntropyShares(), EntropyShares(from_first_layer=True)
    q, k = quiet()
    for layer, entropy in enumerate([[1.0, 2, 3, 4], [5.0, 2, 3, 1]]):
        for shift in (-0.5, 0.5):  # two documents
            sample = LayerSample(
                q=q, k=k, scale=SCALE, block=BLOCK, layer=layer, entropy=np.array(entropy) + shift
            )
            rule.observe(sample)
            literal.observe(sample)
    np.testing.assert_allclose(rule.shares(0), [0.1, 0.3, 0.5, 0.7])
    np.testing.assert_allclose(rule.shares(1), [0.9, 0.3, 0.5, 0.1])
    thirds = 0.1 + 0.8 * np.arange(4) / 3
    np.testing.assert_allclose(literal.shares(0), thirds)
    np.testing.assert_allclose(literal.shares(1), thirds)
