"""Schedules of TPU kernels: packed entries in groups, rows divided into launches and cores.

A row takes its items in groups of `slots`. First come masked groups, whose pairs need an element
mask: they hold the partial items, and the full ones that do not fill a group. Then come unmasked
groups of full items. Each slot of a group is one int32 entry: the number of a block, and two flags.

The entries of a launch have to fit into scalar memory, so a long list is divided, between rows,
into several launches; each of these among cores with about equal work. Built by NumPy for a static
layout, by JAX for a traced one, whose launches have the capacity for any list.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, TileSizes
from xsake.kernels.mask_program import MaskProgram, trace_mask
from xsake.layout.csr import at_least_one, counts_to_starts, item_rows, namespace, partial_first
from xsake.layout.numbering import FlatItems, RaggedGrid, build_mask_blocks, flat_items

type Layout = Any  # `BlockLayout`, or `TransposedLayout` of a pass over kv blocks

# Scalar memory is 1 MiB on every TPU; libtpu 0.0.50.1 accepts lists of 245,760 int32, not 262,144.
MAX_ENTRIES = 240_000
# Two cores share a launch on v4 and v5p; elsewhere the two parts run one after the other.
CORES = 2
# Tokens per group. Smaller: fixed overhead dominates. Larger: more padding and code.
GROUP_TOKENS, MAX_SLOTS = 512, 4
LIVE, PARTIAL = 1, 2
FLAG_BITS = 2
MAX_BLOCKS = 1 << (31 - FLAG_BITS)  # numbers that an entry can hold
_ROW_ENTRIES = 2  # first group of a row, and its first unmasked one


@dataclasses.dataclass(frozen=True)
class PackedSizes:
    """Sizes of a packed schedule, known while tracing."""

    slots: int  # items of a group
    cores: int  # that share a launch
    launches: int  # of the kernel
    groups: int  # capacity of one launch
    rows: int

    @property
    def entries(self) -> int:
        """int32 in scalar memory of a launch."""
        return self.groups * self.slots + self.rows * _ROW_ENTRIES


class PackedSchedule(NamedTuple):
    """A packed list; one group and one row more than its capacity, which the prefetch reads."""

    sizes: PackedSizes
    entries: Any  # int32 [launches, (groups + 1) * slots]
    items: Any  # int32 like `entries`: item of a slot
    starts: Any  # int32 [launches, rows + 1]: first group of a row
    first_unmasked: Any  # int32 [launches, rows + 1]: its first unmasked group
    bounds: Any  # int32 [launches, cores + 1]: first row of each core, among all rows
    steps: Any  # int32 [launches]: rows of the core with the most


@dataclasses.dataclass(frozen=True, eq=False)
class TpuSchedule:
    """Schedule of one pass."""

    layout: Layout
    grid: RaggedGrid  # numbering of the blocks
    packed: PackedSchedule  # the list
    # Of the mask; the reason why it has none; or None without a mask
    mask_program: MaskProgram | str | None

    def num_steps(self, launch: int):
        """Rows of the core with the most: an int if the layout is static."""
        steps = self.packed.steps[launch]
        return int(steps) if self.layout.is_static else steps

    def mask_blocks(self, keys_first: bool):
        """`(element masks or None, mask id of each slot by launch)` of masks without a program."""
        if not isinstance(self.mask_program, str):
            return None, np.zeros((self.packed.sizes.launches, 1), np.int32)
        blocks, ids = _static_mask_blocks(self.layout, self.grid, keys_first)
        return blocks, ids[self.packed.items] if ids.size else self.packed.items


def schedule_queries(inputs: BlockSparseInputs, config: BlockSparseConfig) -> TpuSchedule:
    """Schedule of a pass over rows of query blocks."""
    layout = inputs.layout
    return _schedule(layout, _num_slots(config, layout.block_kv, layout.kv_blocks), inputs)


def schedule_keys(inputs: BlockSparseInputs, config: BlockSparseConfig) -> TpuSchedule:
    """Schedule of a pass over rows of kv blocks; items are query blocks."""
    layout = inputs.layout
    transposed = layout.transpose(inputs.k.shape[2], inputs.q.shape[2])
    return _schedule(transposed, _num_slots(config, layout.block_q, layout.q_blocks), inputs)


def count_schedules(
    inputs: BlockSparseInputs, config: BlockSparseConfig
) -> tuple[cost.ScheduleCost, cost.ScheduleCost]:
    """Cost of the schedules of queries and of keys."""
    layout = inputs.layout
    if layout.is_static:
        made = schedule_queries(inputs, config), schedule_keys(inputs, config)
        return count_schedule(made[0], inputs), count_schedule(made[1], inputs)
    heads = inputs.k.shape[2], inputs.q.shape[2]
    transposed = jax.eval_shape(lambda layout: layout.transpose(*heads), layout)
    return (
        _bound(layout, _num_slots(config, layout.block_kv, layout.kv_blocks), inputs),
        _bound(transposed, _num_slots(config, layout.block_q, layout.q_blocks), inputs),
    )


def has_too_many_blocks(inputs: BlockSparseInputs) -> bool:
    """Whether an entry cannot hold the numbers of all blocks."""
    (batch, q_tokens, q_heads, _), (kv_tokens, kv_heads) = inputs.q.shape, inputs.k.shape[1:3]
    layout = inputs.layout
    most = max(q_heads * q_tokens // layout.block_q, kv_heads * kv_tokens // layout.block_kv)
    return batch * (most + q_heads) > MAX_BLOCKS


def _num_slots(config: BlockSparseConfig, block: int, blocks: int) -> int:
    """Items of a group, for inner blocks of `block` tokens."""
    if config.tiles is not None:
        return config.tiles.blocks
    return max(1, min(GROUP_TOKENS // block, MAX_SLOTS, blocks))


def _program(layout: Layout) -> MaskProgram | str | None:
    return None if layout.mask is None else trace_mask(layout.mask)


def _max_entries(program: MaskProgram | str | None) -> int:
    """Ids of precomputed element masks take as much scalar memory as the entries."""
    return MAX_ENTRIES // 2 if isinstance(program, str) else MAX_ENTRIES


def _schedule(layout: Layout, slots: int, inputs: BlockSparseInputs) -> TpuSchedule:
    program = _program(layout)
    grid = RaggedGrid.of(layout, inputs.q.shape, inputs.k.shape)
    make = _pack_static if layout.is_static else _pack_layout
    return TpuSchedule(
        layout, grid, make(layout, grid, slots, CORES, _max_entries(program)), program
    )


def _pack_layout(layout: Layout, grid: RaggedGrid, slots: int, cores: int, max_entries: int):
    return pack(flat_items(layout, grid), slots, cores, max_entries, _max_row(grid))


# Static schedules are cached: forward and backward, and every layer, use the same ones.
_pack_static = functools.lru_cache(maxsize=64)(_pack_layout)


def _max_row(grid: RaggedGrid) -> int:
    """Maximum items of a row."""
    return grid.inner_blocks * (grid.group if grid.is_kv_major else 1)


@functools.lru_cache(maxsize=16)
def _static_mask_blocks(layout: Layout, grid: RaggedGrid, keys_first: bool):
    """Element masks of a static layout's partial blocks."""
    blocks = layout.block_q, layout.block_kv
    return build_mask_blocks(layout.mask, flat_items(layout, grid), grid, blocks, keys_first)


def count_schedule(made: TpuSchedule, inputs: BlockSparseInputs) -> cost.ScheduleCost:
    """Cost of a schedule; an upper bound if the layout is traced."""
    if not made.layout.is_static:
        return _bound(made.layout, made.packed.sizes.slots, inputs)
    packed, sizes = made.packed, made.packed.sizes
    borders = np.take_along_axis(packed.starts, packed.bounds - packed.bounds[:, :1], 1)
    of_cores = np.diff(borders, axis=1)
    total, busiest = int(of_cores.sum()), int(of_cores.max(1).sum())
    groups = total * made.grid.replicas
    return cost.ScheduleCost(
        tiles=TileSizes(1, sizes.slots),
        computed=groups * sizes.slots,
        launches=sizes.launches,
        steps=groups,
        balance=busiest * sizes.cores / total if total else 1.0,
    )


def _bound(layout: Layout, slots: int, inputs: BlockSparseInputs) -> cost.ScheduleCost:
    """Cost of a list whose items are not known."""
    grid = RaggedGrid.of(layout, inputs.q.shape, inputs.k.shape)
    capacity = layout.capacity * (grid.group // layout.group if grid.is_kv_major else 1)
    groups = max_groups(layout.rows, capacity, slots)
    sizes = pack_sizes(
        layout.rows, groups, _max_row(grid), slots, CORES, _max_entries(_program(layout))
    )
    tiles, steps = TileSizes(1, slots), groups * grid.replicas
    return cost.ScheduleCost(tiles=tiles, computed=None, launches=sizes.launches, steps=steps)


def pack(
    items: FlatItems, slots: int, cores: int, max_entries: int, max_row: int
) -> PackedSchedule:
    """Group `slots` items each and divide the rows into launches of at most `max_entries` int32.

    `max_row` is the maximum number of items of a row of a traced list.
    """
    xp = namespace(items.row_starts)
    counts = items.row_starts[1:] - items.row_starts[:-1]
    starts = counts_to_starts(xp, -(-counts // slots))
    rows, capacity = counts.shape[0], items.number.shape[0]
    groups = int(starts[-1]) if xp is np else max_groups(rows, capacity, slots)
    max_row = int(counts.max()) if xp is np else max_row
    sizes = pack_sizes(rows, groups, max_row, slots, cores, max_entries)
    first_unmasked, entries, item = _group_items(xp, items, starts, groups, slots)
    bounds = _bounds(xp, starts, sizes)
    if xp is np:
        sizes = _shrink(sizes, starts, bounds)

    first = starts[bounds[:, 0]][:, None]
    # Past its end a launch prefetches what comes next and drops it.
    group = xp.minimum(first + xp.arange(sizes.groups + 1, dtype=xp.int32)[None], groups)
    row = xp.minimum(bounds[:, :1] + xp.arange(sizes.rows + 1, dtype=xp.int32)[None], rows)
    shape = sizes.launches, -1
    return PackedSchedule(
        sizes,
        entries[group].reshape(shape),
        item[group].reshape(shape),
        starts[row] - first,
        first_unmasked[row] - first,
        bounds,
        (bounds[:, 1:] - bounds[:, :-1]).max(1),
    )


def max_groups(rows: int, capacity: int, slots: int) -> int:
    """Maximum groups of rows of any length: the full groups of all items, and one per row."""
    return rows + capacity // slots


def pack_sizes(
    rows: int, groups: int, max_row: int, slots: int, cores: int, max_entries: int
) -> PackedSizes:
    """Sizes with the fewest launches that fit; as many launches as rows allow if none does."""
    cores = min(cores, rows)
    whole = sizes = PackedSizes(slots, cores, 1, groups, rows)
    row_entries = -(-max_row // slots) * slots + _ROW_ENTRIES
    while sizes.entries > max_entries and (sizes.launches + 1) * cores <= rows:
        launches = sizes.launches + 1
        # Borders lie between rows, so each core exceeds its share by less than a row.
        entries = -(-whole.entries // launches) + cores * row_entries
        limits = min(groups, entries // slots), min(rows, entries // _ROW_ENTRIES)
        sizes = PackedSizes(slots, cores, launches, *limits)
    return sizes


def _shrink(sizes: PackedSizes, starts: Any, bounds: Any) -> PackedSizes:
    """The same sizes without spare capacity."""
    first, last = bounds[:, 0], bounds[:, -1]
    return dataclasses.replace(
        sizes, groups=int((starts[last] - starts[first]).max()), rows=int((last - first).max())
    )


def _group_items(xp: Any, items: FlatItems, starts: Any, groups: int, slots: int):
    """First unmasked groups of rows [R + 1]; entries and items of groups, [groups + 1, slots]."""
    rows = items.row_starts.shape[0] - 1
    order, partial = partial_first(items.row_starts, items.is_partial)
    full = items.row_starts[1:] - items.row_starts[:-1] - partial
    masked = partial + full % slots
    first_unmasked = starts[:-1] + -(-masked // slots)
    row = xp.minimum(item_rows(xp, starts, groups + 1), rows - 1)
    group = xp.arange(groups + 1, dtype=xp.int32)
    is_unmasked = group >= first_unmasked[row]
    index = xp.where(
        is_unmasked,
        masked[row] + (group - first_unmasked[row]) * slots,
        (group - starts[row]) * slots,
    )
    index = index[:, None] + xp.arange(slots, dtype=xp.int32)[None]
    is_live = is_unmasked[:, None] | (index < masked[row][:, None])
    is_live = is_live & (group < starts[-1])[:, None]
    # A dead slot repeats the first item of its group.
    item = items.row_starts[row][:, None] + xp.where(is_live, index, index[:, :1])
    item = at_least_one(xp, order)[xp.clip(item, 0, max(order.shape[0] - 1, 0))]
    flags = xp.where(at_least_one(xp, items.is_partial)[item], LIVE | PARTIAL, LIVE)
    number = at_least_one(xp, items.number)[item] << FLAG_BITS
    entries = number | xp.where(is_live, flags, 0)
    return xp.concatenate([first_unmasked, starts[-1:]]), entries.astype(xp.int32), item


def _bounds(xp: Any, starts: Any, sizes: PackedSizes):
    """First row of every core [launches, cores + 1]: whole rows, at least one, work about equal."""
    rows, chunks = starts.shape[0] - 1, sizes.launches * sizes.cores
    order = xp.arange(chunks, dtype=xp.int32)
    work = starts * sizes.slots + xp.arange(rows + 1, dtype=xp.int32) * _ROW_ENTRIES
    share = -(-work[-1] // chunks)
    first = xp.searchsorted(work[:-1], order * share).astype(xp.int32) - order
    first = np.maximum.accumulate(first) if xp is np else lax.cummax(first)
    first = xp.minimum(first + order, rows - chunks + order)
    first = xp.concatenate([first, xp.full(1, rows, xp.int32)])
    index = np.arange(sizes.launches)[:, None] * sizes.cores + np.arange(sizes.cores + 1)
    return first[index]
