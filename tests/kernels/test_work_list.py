"""Packed schedules: every item once, in its row, masked where it must be, in launches that fit."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from xsake.kernels.block_sparse.mosaic_tpu import schedule
from xsake.kernels.block_sparse.mosaic_tpu.schedule import FLAG_BITS, LIVE, PARTIAL
from xsake.layout.numbering import FlatItems


@st.composite
def ragged_items(draw):
    """Rows of 0 to 9 items with distinct numbers, some of them partial."""
    counts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=14))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    number = rng.permutation(1000)[: starts[-1]].astype(np.int32)
    is_partial = rng.random(starts[-1]) < draw(st.sampled_from([0.0, 0.4, 1.0]))
    return FlatItems(starts, number, is_partial)


def live_slots(packed, launch):
    """(row, number, is_partial, is in a masked group) of all live slots, in a kernel's order."""
    sizes, slots_seen = packed.sizes, []
    entries, starts, first_unmasked, bounds, steps = (
        np.asarray(x)[launch]
        for x in (packed.entries, packed.starts, packed.first_unmasked, packed.bounds, packed.steps)
    )
    for core in range(sizes.cores):
        assert bounds[core] < bounds[core + 1] <= bounds[core] + steps
        for row in range(bounds[core], bounds[core + 1]):
            at = row - bounds[0]
            for group in range(starts[at], starts[at + 1]):
                slots = entries[group * sizes.slots : (group + 1) * sizes.slots]
                is_masked = group < first_unmasked[at]
                assert slots[0] & LIVE, "a group begins with a live slot"
                for entry in slots:
                    assert is_masked or entry & LIVE, "a dead slot in an unmasked group"
                    if entry & LIVE:
                        is_partial = bool(entry & PARTIAL)
                        slots_seen.append((row, entry >> FLAG_BITS, is_partial, is_masked))
    return slots_seen


def check(items, packed, max_entries):
    """Conditions that hold for every packed schedule."""
    sizes, num_rows = packed.sizes, len(items.row_starts) - 1
    rows = np.repeat(np.arange(num_rows), np.diff(items.row_starts))
    seen = [x for launch in range(sizes.launches) for x in live_slots(packed, launch)]
    assert sorted(x[:3] for x in seen) == sorted(
        zip(rows, items.number, items.is_partial, strict=True)
    )
    assert all(masked for *_, partial, masked in seen if partial), "a partial item unmasked"
    another_fits = (sizes.launches + 1) * sizes.cores <= num_rows
    assert sizes.entries <= max_entries or not another_fits


SIZES = st.integers(1, 4), st.integers(1, 3), st.sampled_from([20, 40, 10**6])


@settings(deadline=None)
@given(ragged_items(), *SIZES)
def test_every_item_is_taken_once_in_its_row(items, slots, cores, max_entries):
    check(items, schedule.pack(items, slots, cores, max_entries, 9), max_entries)


@settings(max_examples=3, deadline=None)  # each has different shapes, so each is compiled
@given(ragged_items(), *SIZES)
def test_every_item_of_a_traced_list_is_taken_once_in_its_row(items, slots, cores, max_entries):
    traced = FlatItems(*map(jnp.asarray, items))
    pack = jax.jit(lambda items: schedule.pack(items, slots, cores, max_entries, 9)[1:])
    num_rows = len(items.row_starts) - 1
    groups = schedule.max_groups(num_rows, len(items.number), slots)
    sizes = schedule.pack_sizes(num_rows, groups, 9, slots, cores, max_entries)
    check(items, schedule.PackedSchedule(sizes, *pack(traced)), max_entries)


def test_a_long_list_is_divided_into_launches_that_fit():
    counts = np.random.default_rng(0).integers(1, 200, 4096)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    number = np.arange(starts[-1], dtype=np.int32)
    items = FlatItems(starts, number, np.zeros(number.shape, bool))
    packed = schedule.pack(items, 4, 2, 50_000, 200)
    assert packed.sizes.launches == 11
    assert packed.sizes.entries <= 50_000
    of_launch = packed.bounds - packed.bounds[:, :1]
    groups = np.diff(np.take_along_axis(packed.starts, of_launch, 1), axis=1)
    assert np.diff(packed.bounds, axis=1).min() >= 1
    assert groups.max() <= 1.02 * groups.mean(), "cores are out of balance"
