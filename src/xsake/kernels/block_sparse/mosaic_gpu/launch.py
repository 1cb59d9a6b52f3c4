"""Launch of GPU kernels over a schedule: arrays, shared memory, copies, warp groups, loops.

Arrays keep the order of the call: [B, T, H, D] is viewed as [B, T, H * D], and tiles are slices of
it; statistics are [B, H, T], positions and segments [B or 1, T]. Arrays are copied only where
tokens or features have to be padded to whole tiles. `outer` is the side that owns a row, `inner`
the side that its items name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu.masking import TileCoords, TilePairs, locate_tile
from xsake.kernels.block_sparse.mosaic_gpu.ops import Ref, Scalar
from xsake.kernels.block_sparse.mosaic_gpu.schedule import GpuSchedule, RowLists, Tile
from xsake.kernels.block_sparse.mosaic_gpu.split_rows import sum_pieces
from xsake.kernels.block_sparse.types import BlockSparseInputs
from xsake.kernels.blocking import KeyArrays, QueryArrays, pad_axis
from xsake.kernels.online_softmax import BackwardRows
from xsake.kernels.sharding import axes_of, vary
from xsake.layout.numbering import quotient, remainder

# Tensor cores contract this many features at once.
FEATURES = 16
# Double buffering: one tile is computed while the next one is copied.
STAGES = 2
# Arrays that are copied into shared memory, and those that are read from global memory.
_TILES = ("q", "do", "k", "v")
_STATISTICS = ("lse", "delta", "poison")


class GpuKernelBody(NamedTuple):
    """Computation of a tile of a row.

    name: of the pass, as profiles show it.
    prologue(outer) -> state: initialize.
    body(pairs, outer, inner, state, is_masked) -> state: one tile of the inner side.
    epilogue(state) -> results: one for each result of the pass.
    """

    name: str
    prologue: Callable[..., Any]
    body: Callable[..., Any]
    epilogue: Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class GpuLaunch:
    """One pass of a call over a schedule."""

    inputs: BlockSparseInputs  # of the call
    schedule: GpuSchedule  # of the pass
    ops: gpu.GpuOps  # instructions of the GPU, or of the interpreter
    groups: gpu.WarpGroups = gpu.WarpGroups()  # warp specialization of a thread block

    def pack_queries(self, q: Array, rows: BackwardRows | None = None) -> QueryArrays:
        """Arrays of the queries, padded to whole tiles."""
        inputs, (tile, _) = self.inputs, self.schedule.grid.q_and_kv(*self.schedule.tiles)
        q, residuals = _pack_tokens(q, tile), (None, None, None)
        if rows is not None:
            do, lse = _pack_tokens(rows.do, tile), _pack_rows(rows.lse, tile, jnp.inf)
            residuals = do, lse, _pack_rows(rows.delta, tile, 0)
        positions = _pack_integers(inputs.q_positions, tile, 0)
        return QueryArrays(q, *residuals, positions, _pack_integers(inputs.q_segment_ids, tile, -1))

    def pack_keys(self, k: Array, v: Array, poison: Array | None = None) -> KeyArrays:
        """Arrays of the keys, padded to whole tiles."""
        inputs, (_, tile) = self.inputs, self.schedule.grid.q_and_kv(*self.schedule.tiles)
        return KeyArrays(
            _pack_tokens(k, tile),
            _pack_tokens(v, tile),
            None if poison is None else _pack_rows(poison, tile, 0),
            _pack_integers(inputs.kv_positions, tile, 0),
            _pack_integers(inputs.kv_segment_ids, tile, -1),
        )

    def run(
        self,
        body: GpuKernelBody,
        outer: QueryArrays | KeyArrays,
        inner: QueryArrays | KeyArrays,
        results: Sequence[tuple[int | None, Any]],
    ) -> list[Array]:
        """Run the kernel; each of `results` is (features or None for a statistic, dtype).

        Returns the results, [B, T, H, features] or [B, T, H].
        """
        schedule, grid = self.schedule, self.schedule.grid
        shapes = [self._result(*result) for result in results]
        lists = jax.tree.map(jnp.asarray, schedule.lists)
        operands, tree = jax.tree.flatten((lists, outer, inner, _pad_mask_blocks(schedule)))
        scratch, scratch_tree = jax.tree.flatten(self._scratch(outer, inner))
        run_row = _run_specialized if self.groups.workers else _run_alone

        def kernel(program: Scalar, *refs: Ref) -> None:
            given, rest = refs[: len(operands)], refs[len(operands) :]
            out, memory = rest[: len(results)], rest[len(results) :]
            refs_of_program = ProgramRefs(program, *jax.tree.unflatten(tree, given))
            memory = jax.tree.unflatten(scratch_tree, memory)
            run_row(RowProgram(self, body, refs_of_program, out, memory))

        call = gpu.launch(
            kernel,
            shapes,
            scratch,
            schedule.programs // max(self.groups.workers, 1),
            name=f"block_sparse_{body.name}",
            interpret=self.ops.interpret,
            groups=self.groups,
        )
        axes = axes_of(self.inputs.q)
        # Results of Mosaic GPU lack the mesh axes that they vary over.
        outputs = vary(call(*vary(operands, axes)), axes)
        if schedule.max_pieces > 1:
            merge = lambda x: sum_pieces(x, schedule.first, schedule.max_pieces, grid)
            outputs = [merge(x) for x in outputs]
        return [
            _unpad(x, schedule.outer, schedule.tokens[0], features).astype(dtype)
            for x, (features, dtype) in zip(outputs, results, strict=True)
        ]

    def _result(self, features: int | None, dtype: Any) -> jax.ShapeDtypeStruct:
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

    def _scratch(
        self, outer: QueryArrays | KeyArrays, inner: QueryArrays | KeyArrays
    ) -> "SharedMemory":
        """Types of the shared memory."""
        grid, ops, groups = self.schedule.grid, self.ops, self.groups
        workers, (outer_tile, inner_tile) = groups.workers or 1, self.schedule.tiles

        def tiles(side: QueryArrays | KeyArrays, number: int, tile: Tile, heads: int) -> list[Any]:
            shape = lambda x: (number, tile.tile, x.shape[-1] // heads)
            return [gpu.shared(shape(x), x.dtype, ops) for x in _tiles(side)]

        outer_tiles = tiles(outer, workers, outer_tile, grid.outer_heads)
        inner_tiles = tiles(inner, STAGES, inner_tile, grid.inner_heads)
        return SharedMemory(
            outer_tiles,
            inner_tiles,
            ops.barriers(len(outer_tiles), workers),
            ops.barriers(len(inner_tiles), STAGES),
            groups.barriers(STAGES) if groups.workers else [],
        )


class ProgramRefs(NamedTuple):
    """Refs in global memory that a thread block reads."""

    number: Scalar  # of the thread block
    lists: RowLists
    outer: Any  # `QueryArrays` or `KeyArrays`
    inner: Any
    mask_blocks: Ref


class SharedMemory(NamedTuple):
    """Shared memory of a thread block: types, or refs."""

    outer: list[Any]  # tiles
    inner: list[Any]
    outer_barriers: list[Any]
    inner_barriers: list[Any]
    read_barriers: list[Any]  # of slots that all compute groups have read


class RowProgram:
    """A thread block: one tile of a piece of a row, or one for each compute warp group."""

    def __init__(
        self,
        launch: GpuLaunch,
        body: GpuKernelBody,
        refs: ProgramRefs,
        results: Sequence[Ref],
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

    def outer_coords(self, worker: Scalar) -> TileCoords:
        """Coordinates of the outer tile of a warp group."""
        part = self._group * max(self.launch.groups.workers, 1) + worker
        tile, grid = self.schedule.outer, self.grid
        return locate_tile(self._outer_number, part, tile, grid.outer_heads, grid.outer_blocks)

    def _inner_coords(self, step: Scalar) -> tuple[Scalar, TileCoords]:
        """The item of a step, and the coordinates of its tile."""
        tile, grid = self.schedule.inner, self.grid
        item = self._first + quotient(step, tile.tiles)
        number = self.lists.block_ids[item] + grid.inner_offset(self._replica)
        part = remainder(step, tile.tiles)
        return item, locate_tile(number, part, tile, grid.inner_heads, grid.inner_blocks)

    def prefetch(self, step: Scalar) -> None:
        """Start the copies of the inner tiles of a step."""
        slot, (_, coords) = lax.rem(step, STAGES), self._inner_coords(step)
        for source, target in zip(_tiles(self.refs.inner), self.memory.inner, strict=True):
            index, barriers = coords.tokens(*target.shape[1:]), self.memory.inner_barriers
            self.launch.ops.copy(source.at[index], target.at[slot], barriers, slot)

    def prefetch_outer(self, worker: Scalar) -> None:
        """Start the copies of the outer tiles of a warp group."""
        coords = self.outer_coords(worker)
        for source, target in zip(_tiles(self.refs.outer), self.memory.outer, strict=True):
            index, barriers = coords.tokens(*target.shape[1:]), self.memory.outer_barriers
            self.launch.ops.copy(source.at[index], target.at[worker], barriers, worker)

    def compute(self, worker: Scalar, before: Callable, after: Callable) -> None:
        """Compute the row for the outer tile of a warp group, which is in shared memory.

        `before(step)` is called when the tile of a step has arrived, `after(step)` when it is read.
        """
        schedule, memory, coords = self.schedule, self.memory, self.outer_coords(worker)
        tiles = [x.at[worker] for x in memory.outer]
        outer = _with_tiles(self.refs.outer, tiles, coords, schedule.outer)
        sides = self.refs.outer, self.refs.inner

        def take(is_masked: bool) -> Callable[..., Any]:
            def loop_body(step: Scalar, state: Any) -> Any:
                slot = lax.rem(step, STAGES)
                self.launch.ops.wait(memory.inner_barriers, slot)
                before(step)
                item, inner_coords = self._inner_coords(step)
                pairs = TilePairs(
                    schedule, self.lists, (coords, inner_coords), item, step < self.masked_steps,
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
    def _() -> None:
        groups.give_registers()

        @pl.loop(0, row.steps)
        def _(step: Scalar) -> None:
            slot = lax.rem(step, STAGES)
            wait_until_read = lambda: ops.wait(memory.read_barriers, slot)
            pl.when(step >= STAGES)(wait_until_read)
            row.prefetch(step)

    @pl.when(group < groups.workers)
    def _() -> None:
        groups.take_registers()
        row.prefetch_outer(group)
        ops.wait(memory.outer_barriers, group)
        mark_read = lambda step: groups.arrive(memory.read_barriers, lax.rem(step, STAGES))
        row.compute(group, lambda step: None, mark_read)


def _tiles(side: QueryArrays | KeyArrays) -> list[Any]:
    """Arrays that are copied into shared memory."""
    return [x for name, x in side._asdict().items() if name in _TILES and x is not None]


def _with_tiles(side: Any, tiles: list[Ref], coords: TileCoords, tile: Tile) -> Any:
    """A side as kernel bodies see it: tiles in shared memory, statistics in global memory."""
    refs, remaining = {}, iter(tiles)
    for name, x in side._asdict().items():
        if name in _TILES and x is not None:
            refs[name] = next(remaining)
        elif name in _STATISTICS and x is not None:
            refs[name] = x.at[coords.vector(tile.tile)]
    return side._replace(**refs)


def _pad_mask_blocks(schedule: GpuSchedule) -> Array | None:
    """Element masks of blocks, padded to whole tiles; None if there are none."""
    if schedule.mask_blocks is None:
        return None
    rows, columns = (x.padded - x.block for x in (schedule.outer, schedule.inner))
    return jnp.asarray(np.pad(schedule.mask_blocks, ((0, 0), (0, rows), (0, columns))))


def pad_features(features: int) -> int:
    """Round up to a multiple of `FEATURES`."""
    return -(-features // FEATURES) * FEATURES


def _pack_tokens(x: Array, tile: Tile) -> Array:
    """[B, T, H, D] -> [B, T, H * D], with blocks of whole tiles and features of whole steps."""
    x = pad_axis(x, 3, pad_features(x.shape[-1]), 0)
    return _pad_tiles(x.reshape(*x.shape[:2], -1), tile, 1, 0)


def _pack_rows(x: Array, tile: Tile, fill: int | float) -> Array:
    """[B, T, H] -> [B, H, T]."""
    return _pad_tiles(jnp.swapaxes(x, 1, 2), tile, 2, fill)


def _pack_integers(x: Array | None, tile: Tile, fill: int) -> Array | None:
    """[B or 1, T]; None stays None."""
    return None if x is None else _pad_tiles(x.astype(jnp.int32), tile, 1, fill)


def _pad_tiles(x: Array, tile: Tile, axis: int, fill: int | float) -> Array:
    """Pad an axis to whole blocks, and each of them to whole tiles."""
    x = pad_axis(x, axis, -(-x.shape[axis] // tile.block) * tile.block, fill)
    if not tile.is_padded:
        return x
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    x = pad_axis(x.reshape(*before, -1, tile.block, *after), axis + 1, tile.padded, fill)
    return x.reshape(*before, -1, *after)


def _unpad(x: Array, tile: Tile, tokens: int, features: int | None) -> Array:
    """Remove the padding of a result: [B, T, H, ...]."""
    axis = 2 if features is None else 1
    if tile.is_padded:
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, -1, tile.padded, *after)
        x = lax.slice_in_dim(x, 0, tile.block, axis=axis + 1)
        x = x.reshape(*before, -1, *after)
    x = lax.slice_in_dim(x, 0, tokens, axis=axis)
    if features is None:
        return jnp.swapaxes(x, 1, 2)
    return x.reshape(*x.shape[:2], -1, pad_features(features))[..., :features]
