"""Equal-size partitions: every item once, and a maximum close to the mean."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.distributed.load_balancing import partition_equal, partition_snake
from xsake.errors import ArgumentError


@st.composite
def problems(draw):
    parts, each = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    work = draw(st.lists(st.integers(0, 1000), min_size=parts * each, max_size=parts * each))
    return np.array(work), parts


# One shape, so that it is compiled once.
SNAKE_OF_THREE = jax.jit(lambda work: partition_snake(work, 3))


def loads(work, parts):
    return work[np.asarray(parts)].sum(axis=1)


@hypothesis.given(problems())
def test_every_item_is_in_one_part_and_the_maximum_is_bounded(problem):
    work, parts = problem
    result = partition_equal(work, parts)
    assert sorted(result.reshape(-1)) == list(range(work.size))
    assert (np.diff(result, axis=1) > 0).all()
    busiest = loads(work, result).max()
    assert busiest >= max(work.sum() / parts, work.max())
    assert busiest <= work.sum() / parts + work.max()


@hypothesis.given(st.lists(st.integers(0, 1000), min_size=15, max_size=15))
def test_snake_partitions_keep_their_bound(work):
    work = np.array(work)
    result = np.asarray(SNAKE_OF_THREE(jnp.asarray(work)))
    assert sorted(result.reshape(-1)) == list(range(work.size))
    assert (np.diff(result, axis=1) > 0).all()
    assert np.ptp(loads(work, result)) <= np.ptp(work)


def test_small_cases_reach_the_optimum():
    rng = np.random.default_rng(0)
    for _ in range(20):
        work = rng.integers(0, 100, 8)
        ways = [x for x in range(256) if x.bit_count() == 4]
        sums = [sum(int(w) for i, w in enumerate(work) if x >> i & 1) for x in ways]
        best = min(max(x, work.sum() - x) for x in sums)
        result = loads(work, partition_equal(work, 2)).max()
        assert result == best or result <= work.sum() / 2 * 1.001


def test_causal_work_is_balanced_exactly():
    work = np.arange(1, 65)
    assert (loads(work, partition_equal(work, 8)) == work.sum() // 8).all()
    assert (loads(work, partition_snake(jnp.asarray(work), 8)) == work.sum() // 8).all()


@pytest.mark.parametrize(
    ("work", "message"),
    [([1, 2, 3], "3 items, 2 parts"), ([], "0 items"), ([1, -2], "-2"), ([1, np.nan], "finite")],
)
def test_invalid_work_raises(work, message):
    with pytest.raises(ArgumentError, match=message):
        partition_equal(np.array(work, float), 2)
