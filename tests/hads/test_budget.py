"""Budgets in whole blocks: exact sums, bounds kept, ties broken the same way every time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xsake.errors import ArgumentError
from xsake.hads.budget import (
    ForcedBlocks,
    apportion,
    closest_total,
    row_counts,
    total_blocks,
    visible_blocks,
)

always_on = st.builds(ForcedBlocks, num_sink=st.integers(0, 3), num_local=st.integers(0, 4))
lengths = st.integers(1, 12)


@given(lengths, always_on)
def test_always_on_blocks_are_the_first_and_the_last_of_a_row(n, forced):
    grid = forced.grid(n)
    for i, j in np.ndindex(n, n):
        assert grid[i, j] == (j <= i and (j < forced.num_sink or i - j < forced.num_local))
    np.testing.assert_array_equal(forced.counts(n), grid.sum(axis=1))
    assert forced.total(n) == grid.sum()


@pytest.mark.parametrize(
    ("budget", "heads", "n", "expected"),
    [(0.3, 1, 5, 5), (0.7, 1, 5, 11), (0.25, 2, 4, 5), (1.0, 3, 4, 30), (0.2, 270, 64, 112320)],
)
def test_a_budget_is_rounded_half_up_as_it_is_written(budget, heads, n, expected):
    nothing = ForcedBlocks(num_sink=0, num_local=0)
    assert total_blocks(budget, heads=heads, n=n, forced=nothing) == expected


@given(st.integers(4, 80), st.integers(1, 300))
def test_a_budget_below_what_is_always_on_names_the_smallest_that_is_not(n, heads):
    forced = ForcedBlocks()
    with pytest.raises(ArgumentError, match="at least") as caught:
        total_blocks(1e-6, heads=heads, n=n, forced=forced)
    smallest = float(caught.value.expected.split()[2].rstrip(","))
    assert total_blocks(smallest, heads=heads, n=n, forced=forced) >= heads * forced.total(n)
    assert closest_total(1e-6, heads=heads, n=n, forced=forced) == heads * forced.total(n)


@given(lengths, always_on)
def test_rows_are_level_and_the_last_rows_take_what_is_left(n, forced):
    for total in range(forced.total(n), visible_blocks(n) + 1):
        counts = row_counts(total, n, forced)
        assert counts.sum() == total
        assert (counts >= forced.counts(n)).all() and (counts <= np.arange(1, n + 1)).all()
        level = min([count for i, count in enumerate(counts) if count <= i], default=n)
        extra = np.flatnonzero(counts > np.minimum(np.arange(1, n + 1), level))
        assert counts.max() <= level + 1
        np.testing.assert_array_equal(extra, np.arange(n - extra.size, n))


@st.composite
def apportionments(draw):
    size = draw(st.integers(1, 8))
    weights = draw(
        st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.3, 7.5, 1e-7]), min_size=size, max_size=size)
    )
    least = np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    most = least + np.array(draw(st.lists(st.integers(0, 30), min_size=size, max_size=size)))
    return np.array(weights), draw(st.integers(int(least.sum()), int(most.sum()))), least, most


@given(apportionments())
def test_shares_add_up_inside_their_bounds(case):
    weights, total, least, most = case
    shares = apportion(*case)
    assert shares.sum() == total
    assert (shares >= least).all() and (shares <= most).all()
    # Whoever has more weight and room has no less, except where a bound holds the other up.
    for a, b in np.ndindex(weights.size, weights.size):
        if weights[a] > weights[b] and shares[a] < min(most[a], shares[b]):
            assert shares[b] == least[b] or shares[a] >= shares[b] - 1


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=9), st.integers(0, 1000))
def test_without_bounds_nobody_misses_the_proportional_share_by_a_whole_block(weights, total):
    weights = np.array(weights)
    shares = apportion(weights, total, np.zeros(weights.size, int), np.full(weights.size, total))
    exact = total * weights / weights.sum()
    assert (np.abs(shares - exact) < 1 + 1e-6).all()


def test_the_first_of_equals_gets_what_is_left_and_no_weight_comes_last():
    zeros, many = np.zeros(3, int), np.full(3, 9)
    assert apportion(np.ones(3), 5, zeros, many).tolist() == [2, 2, 1]
    assert apportion(np.zeros(3), 5, zeros, many).tolist() == [2, 2, 1]
    assert apportion(np.array([0.0, 1.0, 0.0]), 12, zeros, many).tolist() == [2, 9, 1]


def sharing(weights, total):
    return lambda: apportion(np.array(weights), total, np.array([1, 1]), np.array([4, 4]))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        *((lambda size=size: ForcedBlocks(size), "`num_sink`") for size in (-1, True, 2**20)),
        *(
            (lambda x=x: total_blocks(x, heads=1, n=8, forced=ForcedBlocks()), "share")
            for x in (0.0, -0.1, 1.01, np.nan, np.inf)
        ),
        *((lambda x=x: row_counts(x, 5, ForcedBlocks()), "12 .forced. to 15") for x in (11, 16)),
        (sharing([1.0, -1.0], 3), "invalid weights"),
        (sharing([np.nan, 1.0], 3), "invalid weights"),
        (sharing([1.0, 1.0], 1), "outside of the bounds"),
        (sharing([1.0, 1.0], 9), "outside of the bounds"),
    ],
)
def test_impossible_numbers_are_refused(call, match):
    with pytest.raises(ArgumentError, match=match):
        call()
