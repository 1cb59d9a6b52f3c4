"""Equal shares of unequal work: every item once, equally many each, and close to the mean."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.distributed.packing import dealt, equal_parts
from xsake.errors import ArgumentError


@st.composite
def problems(draw):
    parts, each = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    work = draw(st.lists(st.integers(0, 1000), min_size=parts * each, max_size=parts * each))
    return np.array(work), parts


# One shape, so that it is compiled once.
DEALT_TO_THREE = jax.jit(lambda work: dealt(work, 3))


def loads(work, parts):
    return work[np.asarray(parts)].sum(axis=1)


@hypothesis.given(problems())
def test_every_item_goes_to_one_part_and_no_part_is_busier_than_it_must_be(problem):
    work, parts = problem
    found = equal_parts(work, parts)
    assert sorted(found.reshape(-1)) == list(range(work.size))
    assert (np.diff(found, axis=1) > 0).all()
    busiest = loads(work, found).max()
    assert busiest >= max(work.sum() / parts, work.max())
    assert busiest <= work.sum() / parts + work.max()


@hypothesis.given(st.lists(st.integers(0, 1000), min_size=15, max_size=15))
def test_dealing_in_a_traced_program_keeps_the_bound_it_states(work):
    work = np.array(work)
    found = np.asarray(DEALT_TO_THREE(jnp.asarray(work)))
    assert sorted(found.reshape(-1)) == list(range(work.size))
    assert (np.diff(found, axis=1) > 0).all()
    assert np.ptp(loads(work, found)) <= np.ptp(work)


def test_small_cases_end_at_the_best_of_all_ways():
    rng = np.random.default_rng(0)
    for _ in range(20):
        work = rng.integers(0, 100, 8)
        ways = [x for x in range(256) if x.bit_count() == 4]
        sums = [sum(int(w) for i, w in enumerate(work) if x >> i & 1) for x in ways]
        best = min(max(x, work.sum() - x) for x in sums)
        found = loads(work, equal_parts(work, 2)).max()
        assert found == best or found <= work.sum() / 2 * 1.001


def test_causal_work_is_shared_out_exactly():
    work = np.arange(1, 65)
    assert (loads(work, equal_parts(work, 8)) == work.sum() // 8).all()
    assert (loads(work, dealt(jnp.asarray(work), 8)) == work.sum() // 8).all()


@pytest.mark.parametrize(
    ("work", "words"),
    [([1, 2, 3], "3 items, 2 parts"), ([], "0 items"), ([1, -2], "-2"), ([1, np.nan], "finite")],
)
def test_what_cannot_be_shared_out_is_refused(work, words):
    with pytest.raises(ArgumentError, match=words):
        equal_parts(np.array(work, float), 2)
