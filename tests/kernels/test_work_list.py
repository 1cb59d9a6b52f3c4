"""Packed lists: every item once, in its row, masked where it must be, in launches that fit."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xsake.kernels.block_sparse import work_list
from xsake.kernels.block_sparse.work_list import FLAG_BITS, LIVE, PARTIAL, Items


@st.composite
def ragged_items(draw):
    """Rows of 0 to 9 items with numbers of their own, some of them partial."""
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=14))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    number = rng.permutation(1000)[: starts[-1]].astype(np.int32)
    return Items(starts, number, rng.random(starts[-1]) < draw(st.sampled_from([0.0, 0.4, 1.0])))


def walked(work, launch):
    """(row, number, is_partial, in a careful group) of all live slots, as a kernel meets them."""
    cut, found = work.cut, []
    words, starts, middles, bounds, turns = (
        np.asarray(x)[launch]
        for x in (work.words, work.starts, work.middles, work.bounds, work.turns)
    )
    for part in range(cut.parts):
        assert bounds[part] < bounds[part + 1] <= bounds[part] + turns
        for row in range(bounds[part], bounds[part + 1]):
            at = row - bounds[0]
            for group in range(starts[at], starts[at + 1]):
                slots = words[group * cut.slots : (group + 1) * cut.slots]
                assert slots[0] & LIVE, "a group begins with a live slot"
                for word in slots:
                    assert group < middles[at] or word & LIVE, "a dead slot in a plain group"
                    if word & LIVE:
                        partial = bool(word & PARTIAL)
                        found.append((row, word >> FLAG_BITS, partial, group < middles[at]))
    return found


def check(items, work, most_words):
    """What every list must fulfil."""
    rows = np.repeat(np.arange(len(items.row_starts) - 1), np.diff(items.row_starts))
    found = [x for launch in range(work.cut.launches) for x in walked(work, launch)]
    assert sorted(x[:3] for x in found) == sorted(
        zip(rows, items.number, items.is_partial, strict=True)
    )
    assert all(careful for *_, partial, careful in found if partial), "a partial item unmasked"
    another_fits = (work.cut.launches + 1) * work.cut.parts <= len(items.row_starts) - 1
    assert work.cut.words <= most_words or not another_fits


SIZES = st.integers(1, 4), st.integers(1, 3), st.sampled_from([20, 40, 10**6])


@settings(deadline=None)
@given(ragged_items(), *SIZES)
def test_every_item_is_met_once_in_its_row(items, slots, parts, most_words):
    check(items, work_list.build(items, slots, parts, most_words, 9), most_words)


@settings(max_examples=6, deadline=None)  # each has shapes of its own, so each is compiled
@given(ragged_items(), *SIZES)
def test_every_item_of_a_traced_list_is_met_once_in_its_row(items, slots, parts, most_words):
    traced = Items(*map(jnp.asarray, items))
    work = jax.jit(lambda items: work_list.build(items, slots, parts, most_words, 9)[1:])(traced)
    room = work_list.traced_groups(len(items.row_starts) - 1, len(items.number), slots)
    cut = work_list.cut_of(len(items.row_starts) - 1, room, 9, slots, parts, most_words)
    check(items, work_list.WorkList(cut, *work), most_words)


def test_a_long_list_is_cut_into_launches_that_fit():
    counts = np.random.default_rng(0).integers(1, 200, 4096)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    number = np.arange(starts[-1], dtype=np.int32)
    items = Items(starts, number, np.zeros(number.shape, bool))
    work = work_list.build(items, 4, 2, 50_000, 200)
    assert work.cut.launches == 11
    assert work.cut.words <= 50_000
    share = np.diff(work.bounds, axis=1)
    groups = np.diff(np.take_along_axis(work.starts, work.bounds - work.bounds[:, :1], 1), axis=1)
    assert share.min() >= 1
    assert groups.max() <= 1.02 * groups.mean(), "parts are out of balance"
