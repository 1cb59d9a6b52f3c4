"""Blocks taken by priority, row by row or from one pool: forced first, counts exact."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.rule import take_pool, take_rows
from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks, visible_blocks

always_on = st.builds(ForcedBlocks, num_sink=st.integers(0, 3), num_local=st.integers(0, 4))
lengths = st.integers(1, 12)


@st.composite
def choices(draw):
    """Priorities with many ties and infinities, and what every row or the whole may hold."""
    n, heads, forced = draw(lengths), draw(st.integers(1, 3)), draw(always_on)
    value, size = st.sampled_from([0.0, 0.5, 0.5, 2.0, -np.inf, np.inf]), heads * n * n
    values = draw(st.lists(value, min_size=size, max_size=size))
    return np.array(values).reshape(heads, n, n), forced


def ordered(priority, forced, places):
    """Places by the definition: always on first, then by priority, then as they come."""
    return sorted(
        places, key=lambda p: (not forced.grid(priority.shape[-1])[p[-2:]], -priority[p], p)
    )


@given(choices(), st.data())
def test_rows_take_what_is_always_on_and_then_the_highest_priority(case, data):
    priority, forced = case
    heads, n, _ = priority.shape
    low = forced.counts(n)
    counts = np.array(
        [[data.draw(st.integers(int(low[i]), i + 1)) for i in range(n)] for _ in range(heads)]
    )
    taken = take_rows(priority, counts, forced)
    for head, i in np.ndindex(heads, n):
        best = ordered(priority, forced, [(head, i, j) for j in range(i + 1)])[: counts[head, i]]
        assert sorted(j for _, _, j in best) == np.flatnonzero(taken[head, i]).tolist()


@given(choices(), st.data())
def test_a_pool_takes_what_is_always_on_and_then_the_highest_priority_anywhere(case, data):
    priority, forced = case
    heads, n, _ = priority.shape
    total = data.draw(st.integers(heads * forced.total(n), heads * visible_blocks(n)))
    places = [place for place in np.ndindex(heads, n, n) if place[2] <= place[1]]
    taken = take_pool(priority, total, forced)
    assert taken.sum() == total
    assert all(taken[place] for place in ordered(priority, forced, places)[:total])


def test_priorities_that_are_no_numbers_and_impossible_counts_are_refused():
    priority, forced = np.zeros((2, 4, 4)), ForcedBlocks()
    with pytest.raises(ArgumentError, match="contain nan"):
        take_pool(np.full((4, 4), np.nan), 9, forced)
    for counts in ([1, 2, 3, 5], [1, 2, 2, 3]):
        with pytest.raises(ArgumentError, match="row"):
            take_rows(priority, np.tile(counts, (2, 1)), forced)
    with pytest.raises(ArgumentError, match="18 .forced. to 20"):
        take_pool(priority, 21, forced)
