"""Policies: budgets met to the block, directions as documented, the default the best of all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hads.sample import profile
from xsake.errors import ArgumentError
from xsake.hads.allocation import water_fill
from xsake.hads.budget import level_totals, total_blocks, visible_blocks
from xsake.hads.policies import (
    KL,
    Bounded,
    Entropy,
    EntropyBudget,
    EntropyRandom,
    KeptMass,
    Sensitivity,
    Static,
    TopP,
    Uniform,
    entropy_shares,
)

WITH_BUDGET = (
    Uniform(), EntropyBudget(), EntropyRandom(), KeptMass(curve="pooled"), Sensitivity(),
    KL(curve="pooled"), KL(curve="oracle", floor=0), Static(), Bounded(eps=0.05, curve="pooled"),
)  # fmt: skip


def loss_of(found, totals) -> float:
    """Mean loss by the pooled curves; between two levels it is a straight line."""
    cost = level_totals(np.arange(3, found.n + 1), found.n, found.forced)
    curves = found.curves["pooled"][..., 3:]
    return float(np.mean([np.interp(totals[h], cost, curves[h]) for h in np.ndindex(totals.shape)]))


def test_focused_heads_skip_ninety_percent_and_broad_ones_ten():
    kept = entropy_shares(np.array([[0.7, 1.7, 2.7]]))
    np.testing.assert_allclose(kept, [[0.1, 0.5, 0.9]])
    np.testing.assert_allclose(entropy_shares(np.full((2, 2), 3.0)), 0.1)
    found = profile(n=64)
    shares = Entropy().plan_shares(found, None) / visible_blocks(64)
    np.testing.assert_allclose(shares, entropy_shares(found.entropy), atol=1 / visible_blocks(64))
    original = EntropyRandom().plan_shares(found, None) / visible_blocks(64)
    np.testing.assert_array_equal(original, shares)
    budgeted = EntropyBudget().plan_shares(found, 0.3)
    assert (np.argsort(budgeted, axis=None) == np.argsort(shares, axis=None)).all()


@given(st.integers(0, 10**6), st.floats(0.35, 0.9))
def test_the_default_loses_least_of_all_at_the_same_budget(seed, budget):
    found = profile(n=16, seed=seed)
    best = loss_of(found, KL("pooled", floor=0).plan_shares(found, budget))
    # A partial segment of a curve that is not convex lies above its hull.
    slack = found.curves["pooled"].max() / 6
    for policy in WITH_BUDGET:
        assert best <= loss_of(found, policy.plan_shares(found, budget)) + slack


def test_kept_mass_is_what_a_curve_keeps_and_bounded_has_the_budgets_of_kl():
    found = profile(n=16)
    dropped = 1 - np.exp(-found.curves["pooled"])
    total = total_blocks(0.4, heads=6, n=16, forced=found.forced)
    expected = water_fill(dropped, total, found.forced)
    np.testing.assert_array_equal(KeptMass("pooled").plan_shares(found, 0.4), expected)
    same = KL("pooled").plan_shares(found, 0.4)
    np.testing.assert_array_equal(Bounded(0.1, "pooled").plan_shares(found, 0.4), same)


@given(st.integers(0, 10**6), st.floats(0.05, 1))
def test_top_p_takes_the_first_level_that_keeps_enough(seed, p):
    found = profile(n=12, seed=seed)
    totals = TopP(p, "pooled").plan_shares(found, None)
    for place in np.ndindex(totals.shape):
        levels = [k for k in range(13) if np.exp(-found.curves["pooled"][place][k]) >= p]
        expected = level_totals(np.array([min(levels, default=12)]), 12, found.forced)
        assert totals[place] == expected[0]


NEED_BUDGET = Uniform(), KL("pooled"), Static(), EntropyBudget()


@pytest.mark.parametrize(
    ("policy", "budget", "match"),
    [
        *((policy, None, "requires a budget") for policy in NEED_BUDGET),
        *((policy, 0.1, "forced blocks") for policy in NEED_BUDGET),
        *((policy, 0.5, "takes no budget") for policy in (Entropy(), TopP(0.9, "pooled"))),
        *((KL(curve), 0.8, "'oracle', 'pooled'") for curve in (None, "absent")),
    ],
)
def test_budgets_and_curves_that_do_not_fit_are_refused(policy, budget, match):
    with pytest.raises(ArgumentError, match=match):
        policy.plan_shares(profile(), budget)


@pytest.mark.parametrize("make", [lambda: TopP(0.0), lambda: TopP(1.1), lambda: Bounded(0.0)])
def test_impossible_settings_are_refused(make):
    with pytest.raises(ArgumentError, match="out of range"):
        make()


def test_heads_that_predictions_do_not_heed_get_their_floor():
    found = profile(n=16)
    effects = found.effects["pooled"] * np.array([[1, 1, 0], [1, 1, 1]])[..., None]
    absent = found.model_copy(update={"effects": {}})
    with pytest.raises(ArgumentError, match="XSK-102.policy-effects"):
        Sensitivity().plan_shares(absent, 0.5)
    deaf = found.model_copy(update={"effects": {"pooled": effects}})
    totals = Sensitivity().plan_shares(deaf, 0.5)
    assert totals[0, 2] == totals.min() == level_totals(np.array([4]), 16, found.forced)[0]
