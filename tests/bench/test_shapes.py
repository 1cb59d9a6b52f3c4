import numpy as np
import pytest

from xsake.errors import ArgumentError
from xsake.layout.synthetic import causal_grid, head_budgets, ragged_grid


@pytest.mark.parametrize("mean", [0.25, 0.43, 0.5, 0.7])
def test_head_budgets_reach_both_ends_and_meet_the_mean(mean):
    budgets = head_budgets(12, mean)
    assert budgets.mean() == pytest.approx(mean, abs=1e-6)
    assert budgets[0] == pytest.approx(0.1)
    assert budgets[-1] == pytest.approx(0.9)
    assert (np.diff(budgets) >= 0).all()


def test_half_way_is_a_straight_line():
    np.testing.assert_allclose(head_budgets(9, 0.5), np.linspace(0.1, 0.9, 9), atol=1e-6)


@pytest.mark.parametrize("blocks", [32, 64])
@pytest.mark.parametrize("mean", [0.25, 0.43])
def test_ragged_grids_count_what_they_promise(blocks, mean):
    grid = ragged_grid(12, blocks, mean, seed=1)
    visible = blocks * (blocks + 1) // 2
    shares = grid.sum((1, 2)) / visible
    assert grid.sum() == pytest.approx(mean * 12 * visible, abs=1)
    assert shares.min() == pytest.approx(0.1, abs=2 / visible)
    assert shares.max() == pytest.approx(0.9, abs=2 / visible)
    assert not (grid & ~causal_grid(12, blocks)).any()
    assert np.diagonal(grid, axis1=1, axis2=2).all()


def test_first_and_previous_blocks_are_on_where_the_budget_holds_them():
    grid = ragged_grid(12, 64, 0.43, seed=0)
    rows = np.arange(1, 64)
    assert grid[:, :, 0].all()
    assert grid[:, rows, rows - 1].all()


def test_the_seed_decides():
    same, again, other = (ragged_grid(4, 16, 0.4, seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(same, again)
    assert (same != other).any()


def test_impossible_budgets_are_refused():
    with pytest.raises(ArgumentError):
        head_budgets(12, 0.05)
    with pytest.raises(ArgumentError):
        head_budgets(3, 0.2)
