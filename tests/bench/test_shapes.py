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


@pytest.mark.parametrize(("blocks", "mean"), [(32, 0.25), (64, 0.43)])
def test_ragged_grids_count_what_they_promise(blocks, mean):
    grid = ragged_grid(12, blocks, mean, seed=1)
    visible = blocks * (blocks + 1) // 2
    shares = grid.sum((1, 2)) / visible
    assert grid.sum() == pytest.approx(mean * 12 * visible, abs=1)
    assert shares.min() == pytest.approx(0.1, abs=2 / visible)
    assert shares.max() == pytest.approx(0.9, abs=2 / visible)
    assert not (grid & ~causal_grid(12, blocks)).any()
    rows = np.arange(1, blocks)
    assert grid[:, rows, rows].all()
    if blocks == 64:  # enough for the first and the previous block of every row
        assert grid[:, :, 0].all() and grid[:, rows, rows - 1].all()
    np.testing.assert_array_equal(grid, ragged_grid(12, blocks, mean, seed=1))
    assert (grid != ragged_grid(12, blocks, mean, seed=2)).any()


def test_impossible_budgets_are_refused():
    for heads, mean in ((12, 0.05), (3, 0.2)):
        with pytest.raises(ArgumentError):
            head_budgets(heads, mean)
