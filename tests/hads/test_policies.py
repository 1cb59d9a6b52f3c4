"""Policies: budgets met to the block, directions as documented, the default the best of all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hads.sample import profile
from xsake.errors import ArgumentError
from xsake.hads.allocation import water_fill
from xsake.hads.budget import ForcedBlocks, level_totals, row_counts, total_blocks, visible_blocks
from xsake.hads.policies import (
    KL,
    POLICIES,
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
WITHOUT = (Entropy(), EntropyRandom(), TopP(0.9, curve="pooled"))


def loss_of(found, totals) -> float:
    """Mean loss by the pooled curves; between two levels it is a straight line."""
    cost = level_totals(np.arange(3, found.n + 1), found.n, found.forced)
    curves = found.curves["pooled"][..., 3:]
    return float(np.mean([np.interp(totals[h], cost, curves[h]) for h in np.ndindex(totals.shape)]))


@pytest.mark.parametrize("policy", WITH_BUDGET, ids=repr)
@given(seed=st.integers(0, 10**6), n=st.integers(4, 20), where=st.floats(0, 1))
def test_every_budget_is_met_to_the_block(policy, seed, n, where):
    found = profile(n=n, seed=seed)
    least, most = ForcedBlocks().total(n), visible_blocks(n)
    budget = float(np.ceil((least / most + where * (1 - least / most)) * 1e4) / 1e4)
    totals = policy.plan_shares(found, min(budget, 1.0))
    assert totals.shape == (2, 3)
    assert totals.sum() == total_blocks(min(budget, 1.0), heads=6, n=n, forced=found.forced)
    assert totals.min() >= least and totals.max() <= most
    assert all(
        row_counts(total, n, found.forced).sum() == total for total in totals.flat[:].tolist()
    )


@pytest.mark.parametrize("policy", WITHOUT, ids=repr)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 20))
def test_policies_without_a_budget_stay_inside_what_is_possible(policy, seed, n):
    totals = policy.plan_shares(profile(n=n, seed=seed), None)
    assert totals.min() >= ForcedBlocks().total(n) and totals.max() <= visible_blocks(n)


def test_every_policy_has_its_name():
    tried = {type(policy) for policy in (*WITH_BUDGET, *WITHOUT)}
    assert set(POLICIES.values()) == tried
    assert all(kind.name == name for name, kind in POLICIES.items())


def test_uniform_heads_differ_by_one_block_at_most():
    totals = Uniform().plan_shares(profile(n=16), 0.43)
    assert np.ptp(totals) <= 1


def test_focused_heads_skip_ninety_percent_and_broad_ones_ten():
    kept = entropy_shares(np.array([[0.7, 1.7, 2.7]]))
    np.testing.assert_allclose(kept, [[0.1, 0.5, 0.9]])
    np.testing.assert_allclose(entropy_shares(np.full((2, 2), 3.0)), 0.1)
    found = profile(n=64)
    shares = Entropy().plan_shares(found, None) / visible_blocks(64)
    np.testing.assert_allclose(shares, entropy_shares(found.entropy), atol=1 / visible_blocks(64))
    budgeted = EntropyBudget().plan_shares(found, 0.3)
    assert (np.argsort(budgeted, axis=None) == np.argsort(shares, axis=None)).all()


def test_the_original_has_a_window_and_no_sink():
    forced = EntropyRandom(window=2).forced
    assert (forced.num_sink, forced.num_local) == (0, 3)
    found = profile(n=32)
    np.testing.assert_array_equal(
        EntropyRandom().plan_shares(found, None), Entropy().plan_shares(found, None)
    )


@given(st.integers(0, 10**6), st.floats(0.35, 0.9))
def test_the_default_loses_least_of_all_at_the_same_budget(seed, budget):
    found = profile(n=16, seed=seed)
    best = loss_of(found, KL("pooled", floor=0).plan_shares(found, budget))
    # A partial segment of a curve that is not convex lies above its hull.
    slack = found.curves["pooled"].max() / 6
    for policy in WITH_BUDGET:
        assert best <= loss_of(found, policy.plan_shares(found, budget)) + slack


def test_kept_mass_is_what_a_curve_keeps():
    found = profile(n=16)
    dropped = 1 - np.exp(-found.curves["pooled"])
    total = total_blocks(0.4, heads=6, n=16, forced=found.forced)
    expected = water_fill(dropped, total, found.forced)
    np.testing.assert_array_equal(KeptMass("pooled").plan_shares(found, 0.4), expected)


def test_bounded_has_the_budgets_of_kl_and_keeps_its_bound():
    found = profile(n=16)
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
    deaf = found.model_copy(update={"effects": {"pooled": effects}})
    totals = Sensitivity().plan_shares(deaf, 0.5)
    assert totals[0, 2] == totals.min() == level_totals(np.array([4]), 16, found.forced)[0]


def test_effects_that_nobody_measured_are_missed():
    with pytest.raises(ArgumentError, match="XSK-102.policy-effects"):
        Sensitivity().plan_shares(profile(n=16).model_copy(update={"effects": {}}), 0.5)
