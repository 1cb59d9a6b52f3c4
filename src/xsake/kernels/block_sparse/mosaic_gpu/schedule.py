"""Schedules of GPU kernels: rows split into pieces, longest first, and tiles of blocks."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.mosaic_gpu import split_rows
from xsake.kernels.block_sparse.mosaic_gpu.split_rows import Pieces
from xsake.kernels.block_sparse.types import BlockSparseInputs, TileSizes
from xsake.kernels.mask_program import MaskProgram, flat_tables, trace_mask
from xsake.layout.csr import at_least_one, namespace, partial_first
from xsake.layout.numbering import RaggedGrid, build_mask_blocks, flat_items
from xsake.masks import AbstractMask

type Layout = Any  # `BlockLayout`, or `TransposedLayout` of a pass over kv blocks

# Tensor cores take 64 rows of the side that owns results: 16 for each of four warps.
OUTER_TILE = 64
# Operations of mask programs that Mosaic GPU 0.12 cannot lower, or only for signed integers.
_MISSING = ("population_count", "clz")


class RowLists(NamedTuple):
    """Lists in global memory, read one integer at a time."""

    order: Any  # int32 [P]: pieces of rows, longest first
    rows: Any  # int32 [P]: the row of a piece, in that order
    starts: Any  # int32 [P]: its first item
    stops: Any  # int32 [P]: and the one after its last
    first_unmasked: Any  # int32 [P]: its first item without an element mask
    block_ids: Any  # int32 [W]: block of an item
    mask_ids: Any  # int32 [W]: element mask of an item
    tables: Any  # int32: integers of the mask program for every head


@dataclasses.dataclass(frozen=True)
class Tile:
    """Tiles of the blocks of one side."""

    block: int  # tokens of a block
    tile: int  # tokens of a tile

    @property
    def tiles(self) -> int:
        """Tiles of a block."""
        return -(-self.block // self.tile)

    @property
    def padded(self) -> int:
        """Tokens of a block, padded to whole tiles."""
        return self.tiles * self.tile

    @property
    def is_padded(self) -> bool:
        return self.padded != self.block


@dataclasses.dataclass(frozen=True, eq=False)
class GpuSchedule:
    """Schedule of one pass."""

    layout: Layout
    grid: RaggedGrid  # numbering of the blocks
    lists: RowLists  # in the order of execution
    first: Any  # int32 [R + 1], first piece of a row
    max_pieces: int  # of one row; 1: all rows are whole
    # Of the mask; the reason why it has none; or None without a mask
    mask_program: MaskProgram | str | None
    outer: Tile  # of the side that owns results
    inner: Tile  # of the other side
    mask_blocks: Any  # element masks of blocks, for masks without a program; else None

    @property
    def programs(self) -> int:
        """Thread blocks: one for each tile of a piece."""
        return self.lists.rows.shape[0] * self.grid.replicas * self.outer.tiles

    @property
    def tiles(self) -> tuple[Tile, Tile]:
        """Tiles of the outer and the inner side."""
        return self.outer, self.inner

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the outer and the inner sequence."""
        tokens = self.layout.q_tokens, self.layout.kv_tokens
        return tokens[::-1] if self.grid.is_kv_major else tokens

    @property
    def has_masked(self) -> bool:
        """Whether there may be items that need an element mask."""
        known = self.layout.is_static
        return self.pads_keys or not known or bool(np.any(np.asarray(self.layout.is_partial)))

    @property
    def has_unmasked(self) -> bool:
        """Whether there may be items without an element mask."""
        known = self.layout.is_static
        return not self.pads_keys and (not known or not np.all(np.asarray(self.layout.is_partial)))

    @property
    def pads_keys(self) -> bool:
        """Whether tiles hold padded keys: then every item needs an element mask."""
        return (self.outer if self.grid.is_kv_major else self.inner).is_padded


def schedule_queries(inputs: BlockSparseInputs, inner_tile: int) -> GpuSchedule:
    """Schedule of a pass over rows of query blocks."""
    layout = inputs.layout
    outer, inner = Tile(layout.block_q, OUTER_TILE), Tile(layout.block_kv, inner_tile)
    return _schedule(layout, outer, inner, inputs)


def schedule_keys(inputs: BlockSparseInputs, inner_tile: int) -> GpuSchedule:
    """Schedule of a pass over rows of kv blocks; items are query blocks."""
    layout = inputs.layout
    transposed = layout.transpose(inputs.k.shape[2], inputs.q.shape[2])
    outer, inner = Tile(layout.block_kv, OUTER_TILE), Tile(layout.block_q, inner_tile)
    return _schedule(transposed, outer, inner, inputs)


def gpu_mask_program(mask: AbstractMask | None) -> MaskProgram | str | None:
    """The program of a mask as GPU kernels can evaluate it, or the reason why there is none."""
    with _no_named_device():
        program = None if mask is None else trace_mask(mask)
    if isinstance(program, MaskProgram):
        for step in program.steps:
            if step.operation in _MISSING:
                return f"the rule of {mask!r} uses {step.operation!r}"
    return program


def count_schedules(
    inputs: BlockSparseInputs, inner_tiles: tuple[int, int]
) -> tuple[cost.ScheduleCost, cost.ScheduleCost]:
    """Cost of the schedules of queries and of keys."""
    layout = inputs.layout
    if not cost.is_known(*jax.tree.leaves(layout)):
        replicas = (inputs.q.shape[0] // layout.batch) * (inputs.q.shape[2] // layout.heads)
        steps = layout.capacity * replicas
        most = cost.ScheduleCost(tiles=TileSizes(1, 1), computed=None, launches=1, steps=steps)
        return most, most
    queries, keys = inner_tiles
    return (
        _count_schedule(schedule_queries(inputs, queries)),
        _count_schedule(schedule_keys(inputs, keys)),
    )


def _count_schedule(schedule: GpuSchedule) -> cost.ScheduleCost:
    """Every listed block is computed, padding up to whole tiles included."""
    outer, inner, grid, lists = schedule.outer, schedule.inner, schedule.grid, schedule.lists
    lengths = np.asarray(lists.stops, np.int64) - np.asarray(lists.starts)
    items = int(lengths.sum()) * grid.replicas
    waste = outer.padded * inner.padded / (outer.block * inner.block)
    of_rows = np.bincount(np.asarray(lists.rows), lengths, grid.rows // grid.replicas)
    heads = of_rows.astype(np.int64).reshape(grid.list_batch, -1, grid.outer_blocks)
    widest = int(heads.max(1).sum()) * heads.shape[1] * grid.replicas
    return cost.ScheduleCost(
        tiles=TileSizes(1, 1),
        computed=round(items * waste),
        launches=1,
        steps=items,
        balance=split_rows.balance(lengths, grid.replicas * outer.tiles),
        cores=split_rows.CORES,
        padded=widest / items if items else 1.0,
    )


def _schedule(layout: Layout, outer: Tile, inner: Tile, inputs: BlockSparseInputs) -> GpuSchedule:
    program = gpu_mask_program(layout.mask)
    grid = RaggedGrid.of(layout, inputs.q.shape, inputs.k.shape)
    make = _static_lists if layout.is_static else _lists
    lists, pieces, mask_blocks = make(layout, grid, outer.tiles, isinstance(program, str))
    lists = lists._replace(tables=flat_tables(program))
    return GpuSchedule(
        layout, grid, lists, pieces.first, pieces.max_of_row, program, outer, inner, mask_blocks
    )


def _lists(
    layout: Layout, grid: RaggedGrid, tiles: int, has_masks: bool
) -> tuple[RowLists, Pieces, Any]:
    xp = namespace(layout.row_starts)
    items = flat_items(layout, grid)
    order, partial = partial_first(items.row_starts, items.is_partial)
    mask_blocks, mask_ids = None, xp.zeros(order.shape[0], xp.int32)
    if has_masks:
        blocks = layout.block_q, layout.block_kv
        mask_blocks, mask_ids = build_mask_blocks(
            layout.mask, items, grid, blocks, keys_first=grid.is_kv_major
        )
    first_unmasked = (items.row_starts[:-1] + partial).astype(xp.int32)
    pieces = _pieces(items.row_starts, first_unmasked, grid, tiles, order.shape[0])
    longest_first = split_rows.launch_order(pieces)
    rows, starts, stops, first_unmasked = (x[longest_first] for x in pieces[:4])
    mask_ids = mask_ids[order].astype(xp.int32)
    of_pieces = longest_first, rows, starts, stops, first_unmasked
    lists = RowLists(*of_pieces, items.number[order], mask_ids, None)
    lists = RowLists(*(None if x is None else at_least_one(xp, x) for x in lists))
    return lists, pieces, mask_blocks


def _pieces(
    starts: Any, first_unmasked: Any, grid: RaggedGrid, tiles: int, capacity: int
) -> Pieces:
    """Rows of keys are split where cores would wait for the longest; rows of queries never are."""
    rows, repeats = split_rows.keep_rows(starts, first_unmasked), grid.replicas * tiles
    if not grid.is_kv_major:
        return rows
    if namespace(starts) is np:
        lengths = -np.sort(-np.diff(starts))
        if split_rows.balance(lengths, repeats) <= split_rows.EVEN:
            return rows
    length, longest = split_rows.max_length(capacity, repeats), grid.inner_blocks * grid.group
    if longest <= length:
        return rows
    return split_rows.split(starts, first_unmasked, length, capacity, longest)


# Cached: forward and backward, and every layer, use the same ones.
@functools.lru_cache(maxsize=64)
def _static_lists(
    layout: Layout, grid: RaggedGrid, tiles: int, has_masks: bool
) -> tuple[RowLists, Pieces, Any]:
    with _no_named_device():
        return _lists(layout, grid, tiles, has_masks)


def _no_named_device():
    """Evaluate masks on a device that exists: the default one may be a compile-only target."""
    return jax.default_device(None)
