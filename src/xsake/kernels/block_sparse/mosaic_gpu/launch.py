"""Launch of GPU kernels over a schedule: arrays, shared memory, copies, warp groups, loops.

Arrays keep the order of the call: [B, T, H, D] is viewed as [B, T, H * D], and tiles are slices of
it. Arrays are copied only where tokens or features have to be padded to whole tiles. `outer` is the
side that owns a row, `inner` the side that its items name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from xsake.kernels.batching import axes_of, vary
from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu.masking import TileCoords, TilePairs, locate_tile
from xsake.kernels.block_sparse.mosaic_gpu.padding import (
    pack_integers,
    pack_rows,
    pack_tokens,
    pad_features,
    unpad,
)
from xsake.kernels.block_sparse.mosaic_gpu.schedule import GpuSchedule, RowLists, Tile, to_arrays
from xsake.kernels.block_sparse.mosaic_gpu.split_rows import sum_pieces
from xsake.kernels.block_sparse.types import BlockSparseInputs
from xsake.layout.numbering import quotient, remainder

# Double buffering: one tile is computed while the next one is copied.
STAGES = 2
# Arrays that are copied into shared memory, and those that are read from global memory.
_TILES = ("q", "do", "k", "v")
_STATISTICS = ("lse", "delta", "poison")


class GpuQueries(NamedTuple):
    """Arrays or refs of queries; None where a pass does not need them."""

    q: Any  # [B, T, H * D]
    do: Any  # [B, T, H * Dv]
    lse: Any  # [B, H, T]
    delta: Any  # [B, H, T]
    positions: Any  # [B or 1, T]
    segments: Any  # [B or 1, T]


class GpuKeys(NamedTuple):
    """Arrays or refs of keys."""

    k: Any  # [B, T, H * D]
    v: Any  # [B, T, H * Dv]
    poison: Any  # [B, H, T]: NaN where a key is not finite, else 0
    positions: Any  # [B or 1, T]
    segments: Any  # [B or 1, T]


class GpuKernelBody(NamedTuple):
    """Computation of a tile of a row.

    name: of the pass, as profiles show it.
    prologue(outer) -> state: initialize.
    body(pairs, outer, inner, state, is_masked) -> state: one tile of the inner side.
    epilogue(state) -> results: one for each result of the pass.
    """

    name: str
    prologue: Callable
    body: Callable
    epilogue: Callable


@dataclasses.dataclass(frozen=True, eq=False)
class GpuLaunch:
    """One pass of a call over a schedule.

    Args:
        inputs: of the call.
        schedule: of the pass.
        ops: instructions of the GPU, or of the interpreter.
        groups: warp specialization of a thread block.
    """

    inputs: BlockSparseInputs
    schedule: GpuSchedule
    ops: gpu.GpuOps
    groups: gpu.WarpGroups = gpu.WarpGroups()

    @property
    def _q_tile(self) -> Tile:
        return self.schedule.inner if self.schedule.grid.is_kv_major else self.schedule.outer

    @property
    def _kv_tile(self) -> Tile:
        return self.schedule.outer if self.schedule.grid.is_kv_major else self.schedule.inner

    def pack_queries(self, q, do=None, lse=None, delta=None) -> GpuQueries:
        """Arrays of the queries, padded to whole tiles."""
        inputs, tile = self.inputs, self._q_tile
        return GpuQueries(
            pack_tokens(q, tile),
            None if do is None else pack_tokens(do, tile),
            None if lse is None else pack_rows(lse, tile, jnp.inf),
            None if delta is None else pack_rows(delta, tile, 0),
            pack_integers(inputs.q_positions, tile, 0),
            pack_integers(inputs.q_segment_ids, tile, -1),
        )

    def pack_keys(self, k, v, poison=None) -> GpuKeys:
        """Arrays of the keys, padded to whole tiles."""
        inputs, tile = self.inputs, self._kv_tile
        return GpuKeys(
            pack_tokens(k, tile),
            pack_tokens(v, tile),
            None if poison is None else pack_rows(poison, tile, 0),
            pack_integers(inputs.kv_positions, tile, 0),
            pack_integers(inputs.kv_segment_ids, tile, -1),
        )

    def run(self, body: GpuKernelBody, outer, inner, results):
        """Run the kernel.

        Args:
            body: of the pass.
            outer, inner: a `GpuQueries` and a `GpuKeys`, or the other way round.
            results: (features or None for a statistic, dtype) of each result.

        Returns:
            The results, [B, T, H, features] or [B, T, H].
        """
        schedule, grid = self.schedule, self.schedule.grid
        shapes = [self._result(*result) for result in results]
        operands = to_arrays(schedule.lists), outer, inner, _pad_mask_blocks(schedule)
        flat, tree = jax.tree.flatten(operands)
        scratch = self._scratch(outer, inner)

        run_row = _run_specialized if self.groups.workers else _run_alone

        def kernel(program, *refs):
            given, rest = jax.tree.unflatten(tree, refs[: len(flat)]), refs[len(flat) :]
            memory = SharedMemory(*_unflatten(scratch, rest[len(results) :]))
            refs = ProgramRefs(program, *given)
            run_row(RowProgram(self, body, refs, rest[: len(results)], memory))

        call = gpu.launch(
            kernel,
            shapes,
            [leaf for group in scratch for leaf in group],
            schedule.programs // max(self.groups.workers, 1),
            name=f"block_sparse_{body.name}",
            interpret=self.ops.interpret,
            groups=self.groups,
        )
        axes = axes_of(self.inputs.q)
        # Results of Mosaic GPU lack the mesh axes that they vary over.
        outputs = vary(call(*vary(flat, axes)), axes)
        if schedule.max_pieces > 1:
            merge = lambda x: sum_pieces(x, schedule.first, schedule.max_pieces, grid)
            outputs = [merge(x) for x in outputs]
        outer_tokens = self.schedule.layout.q_tokens
        if grid.is_kv_major:
            outer_tokens = self.schedule.layout.kv_tokens
        return [
            unpad(x, schedule.outer, outer_tokens, features).astype(dtype)
            for x, (features, dtype) in zip(outputs, results, strict=True)
        ]

    def _result(self, features: int | None, dtype) -> jax.ShapeDtypeStruct:
        """Shape of a kernel output: a padded result, or a partial sum for every piece of a row."""
        schedule, grid = self.schedule, self.schedule.grid
        padded = schedule.outer.padded
        if schedule.max_pieces > 1:
            assert features is not None, "statistics of pieces do not add up"
            pieces = schedule.lists.rows.shape[0] * grid.replicas
            return jax.ShapeDtypeStruct((pieces, padded, pad_features(features)), jnp.float32)
        tokens = grid.outer_blocks * padded
        shape = grid.batch, grid.outer_heads, tokens
        if features is not None:
            shape = grid.batch, tokens, grid.outer_heads * pad_features(features)
        return jax.ShapeDtypeStruct(shape, dtype)

    def _scratch(self, outer, inner) -> tuple[list, ...]:
        """Shared memory of outer and inner tiles, and the barriers of both."""
        grid, ops, groups = self.schedule.grid, self.ops, self.groups
        outer_shape = (groups.workers or 1, self.schedule.outer.tile)
        inner_shape = STAGES, self.schedule.inner.tile
        of = lambda side, shape, heads: [
            gpu.shared((*shape, x.shape[-1] // heads), x.dtype, ops) for x in _tiles(side)
        ]
        outer_tiles, inner_tiles = (
            of(outer, outer_shape, grid.outer_heads),
            of(inner, inner_shape, grid.inner_heads),
        )
        return (
            outer_tiles,
            inner_tiles,
            ops.barriers(len(outer_tiles), outer_shape[0]),
            ops.barriers(len(inner_tiles), STAGES),
            groups.barriers(STAGES) if groups.workers else [],
        )


class ProgramRefs(NamedTuple):
    """Refs in global memory that a thread block reads."""

    number: Any
    lists: RowLists
    outer: Any
    inner: Any
    mask_blocks: Any


class SharedMemory(NamedTuple):
    """Shared memory of a thread block."""

    outer: Any
    inner: Any
    outer_barriers: Any
    inner_barriers: Any
    read_barriers: Any


class RowProgram:
    """A thread block: one tile of a piece of a row, or one for each compute warp group."""

    def __init__(
        self,
        launch: GpuLaunch,
        body: GpuKernelBody,
        refs: ProgramRefs,
        results: Sequence[Any],
        memory: SharedMemory,
    ):
        self.launch, self.body, self.refs = launch, body, refs
        self.results, self.memory = results, memory
        self.schedule, self.lists, self.grid = launch.schedule, refs.lists, launch.schedule.grid
        groups = self.schedule.outer.tiles // max(launch.groups.workers, 1)
        self._group = remainder(refs.number, groups)
        piece = quotient(refs.number, groups)
        self._piece = quotient(piece, self.grid.replicas)
        self._replica = remainder(piece, self.grid.replicas)
        row = self.lists.rows[self._piece]
        self._outer_number = self.grid.outer_number(row, self._replica)
        self._first, tiles = self.lists.starts[self._piece], self.schedule.inner.tiles
        self.steps = (self.lists.stops[self._piece] - self._first) * tiles
        self.masked_steps = (self.lists.first_unmasked[self._piece] - self._first) * tiles

    def outer_coords(self, worker: Any) -> TileCoords:
        """Coordinates of the outer tile of a warp group."""
        part = self._group * max(self.launch.groups.workers, 1) + worker
        tile, grid = self.schedule.outer, self.grid
        return locate_tile(self._outer_number, part, tile, grid.outer_heads, grid.outer_blocks)

    def _inner_coords(self, step: Any) -> tuple[Any, TileCoords]:
        """The item of a step, and the coordinates of its tile."""
        tile, grid = self.schedule.inner, self.grid
        item = self._first + quotient(step, tile.tiles)
        number = self.lists.block_ids[item] + grid.inner_offset(self._replica)
        part = remainder(step, tile.tiles)
        return item, locate_tile(number, part, tile, grid.inner_heads, grid.inner_blocks)

    def prefetch(self, step: Any) -> None:
        """Start the copies of the inner tiles of a step."""
        slot, (_, coords) = lax.rem(step, STAGES), self._inner_coords(step)
        for source, target in zip(_tiles(self.refs.inner), self.memory.inner, strict=True):
            index, barriers = coords.tokens(*target.shape[1:]), self.memory.inner_barriers
            self.launch.ops.copy(source.at[index], target.at[slot], barriers, slot)

    def prefetch_outer(self, worker: Any) -> None:
        """Start the copies of the outer tiles of a warp group."""
        coords = self.outer_coords(worker)
        for source, target in zip(_tiles(self.refs.outer), self.memory.outer, strict=True):
            index, barriers = coords.tokens(*target.shape[1:]), self.memory.outer_barriers
            self.launch.ops.copy(source.at[index], target.at[worker], barriers, worker)

    def compute(self, worker: Any, before: Callable, after: Callable) -> None:
        """Compute the row for the outer tile of a warp group, which is in shared memory.

        `before(step)` is called when the tile of a step has arrived, `after(step)` when it is read.
        """
        schedule, memory, coords = self.schedule, self.memory, self.outer_coords(worker)
        tiles = [x.at[worker] for x in memory.outer]
        outer = _with_tiles(self.refs.outer, tiles, coords, schedule.outer)
        sides = self.grid.q_and_kv(self.refs.outer, self.refs.inner)

        def take(is_masked: bool):
            def loop_body(step, state):
                slot = lax.rem(step, STAGES)
                self.launch.ops.wait(memory.inner_barriers, slot)
                before(step)
                item, inner_coords = self._inner_coords(step)
                pairs = TilePairs(
                    schedule, self.lists, coords, inner_coords, item, step < self.masked_steps,
                    sides, self.refs.mask_blocks,
                )  # fmt: skip
                tiles = [x.at[slot] for x in memory.inner]
                inner = _with_tiles(self.refs.inner, tiles, inner_coords, schedule.inner)
                state = self.body.body(pairs, outer, inner, state, is_masked)
                after(step)
                return state

            return loop_body

        state = self.body.prologue(outer)
        middle = self.masked_steps if schedule.has_unmasked else self.steps
        if schedule.has_masked:
            state = lax.fori_loop(0, middle, take(True), state)
        if schedule.has_unmasked:
            first = middle if schedule.has_masked else 0
            state = lax.fori_loop(first, self.steps, take(False), state)
        if schedule.max_pieces > 1:
            piece = self.lists.order[self._piece] * self.grid.replicas + self._replica
            coords = TileCoords(piece, 0, 0, 0, coords.part, coords.part * schedule.outer.tile)
        for ref, x in zip(self.results, self.body.epilogue(state), strict=True):
            at = coords.vector(*x.shape) if x.ndim == 1 else coords.tokens(*x.shape)
            gpu.store(ref.at[at], x.astype(ref.dtype))


def _run_alone(row: RowProgram) -> None:
    """One warp group copies and computes.

    Grid    (program,): (piece of a row, replica, tile), pieces longest first, tiles fastest.
    Reads   its outer tiles; the inner tiles of the listed blocks in order: while one is computed
            the next one is copied.
    Loops   first over items with an element mask, then over those without.
    Writes  the tile's results, after the last item.
    """
    ops = row.launch.ops
    row.prefetch_outer(0)
    pl.when(row.steps > 0)(lambda: row.prefetch(jnp.int32(0)))
    ops.wait(row.memory.outer_barriers)
    prefetch_next = lambda step: pl.when(step + 1 < row.steps)(lambda: row.prefetch(step + 1))
    row.compute(0, prefetch_next, lambda step: None)


def _run_specialized(row: RowProgram) -> None:
    """Warp specialization: one warp group copies; the others compute, each its own tile.

    Grid    (program,), as for one group; the compute groups of a program take adjacent tiles.
    Reads   each compute group its outer tiles; all of them the inner tiles that the last group
            copies.
    Loops   as for one group: a slot is filled again once every compute group has read it.
    Writes  each compute group the results of its tile.
    """
    ops, memory, groups = row.launch.ops, row.memory, row.launch.groups
    group = groups.index()

    @pl.when(group == groups.workers)
    def _():
        groups.give_registers()

        @pl.loop(0, row.steps)
        def _(step):
            slot = lax.rem(step, STAGES)
            wait_until_read = lambda: ops.wait(memory.read_barriers, slot)
            pl.when(step >= STAGES)(wait_until_read)
            row.prefetch(step)

    @pl.when(group < groups.workers)
    def _():
        groups.take_registers()
        row.prefetch_outer(group)
        ops.wait(memory.outer_barriers, group)
        mark_read = lambda step: groups.arrive(memory.read_barriers, lax.rem(step, STAGES))
        row.compute(group, lambda step: None, mark_read)


def _tiles(side) -> list:
    return [x for name, x in side._asdict().items() if name in _TILES and x is not None]


def _with_tiles(side, tiles: list, coords: TileCoords, tile: Tile):
    """A side as kernel bodies see it: tiles in shared memory, statistics in global memory."""
    refs, remaining = {}, iter(tiles)
    for name, x in side._asdict().items():
        if name in _TILES and x is not None:
            refs[name] = next(remaining)
        elif name in _STATISTICS and x is not None:
            refs[name] = x.at[coords.vector(tile.tile)]
    return side._replace(**refs)


def _unflatten(groups, refs) -> list:
    """The refs of scratch, in groups."""
    remaining = iter(refs)
    return [[next(remaining) for _ in group] for group in groups]


def _pad_mask_blocks(schedule: GpuSchedule):
    """Element masks of blocks, padded to whole tiles; None if there are none."""
    if schedule.mask_blocks is None:
        return None
    rows, columns = (x.padded - x.block for x in (schedule.outer, schedule.inner))
    return jnp.asarray(np.pad(schedule.mask_blocks, ((0, 0), (0, rows), (0, columns))))
