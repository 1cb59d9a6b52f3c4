"""Launch of TPU kernels over a schedule: blocks, index maps, grid, prefetch, element masks.

Every array is cut into blocks first, [blocks, ...], so that one block is one index and its last two
axes are whole: then any block size and any head dimension can be tiled. `outer` is the side that
owns a row, `inner` the side that its items name.
"""

import dataclasses
import functools
from collections.abc import Callable
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.batching import axes_of, result_shape, vary
from xsake.kernels.block_sparse.mosaic_tpu.schedule import FLAG_BITS, LIVE, PARTIAL, TpuSchedule
from xsake.kernels.block_sparse.types import BlockSparseInputs
from xsake.kernels.mask_program import MaskProgram
from xsake.layout.numbering import RaggedGrid, quotient, remainder


class TpuQueries(NamedTuple):
    """Arrays or refs of query blocks; None where a pass does not need them."""

    q: Any  # [block_q, D]
    do: Any  # [block_q, Dv]
    lse: Any  # [1, block_q]
    delta: Any  # [1, block_q]
    positions: Any  # [1, block_q]
    segments: Any  # [1, block_q]


class TpuKeys(NamedTuple):
    """Arrays or refs of kv blocks."""

    k: Any  # [block_kv, D]
    v: Any  # [block_kv, Dv], or [Dv, block_kv]
    positions: Any  # [1, block_kv]
    segments: Any  # [1, block_kv]


class TpuKernelBody(NamedTuple):
    """Computation of a row.

    name: of the pass, as profiles show it.
    prologue(outer, scratch): initialize.
    body(masks, outer, inner, scratch, is_masked): one group of blocks.
    epilogue(results, scratch): write the results of the row.
    """

    name: str
    prologue: Callable
    body: Callable
    epilogue: Callable


class InnerArrays(NamedTuple):
    """Arrays that are prefetched with the blocks of a schedule."""

    side: Any  # `TpuQueries` or `TpuKeys`
    mask_blocks: Any  # element masks, or None


class ScalarLists(NamedTuple):
    """Lists of a launch in scalar memory."""

    entries: Any
    mask_ids: Any
    starts: Any
    first_unmasked: Any
    bounds: Any
    tables: Any


@dataclasses.dataclass(frozen=True, eq=False)
class TpuLaunch:
    """One pass of a call over a schedule.

    Args:
        inputs: of the call.
        schedule: of the pass.
        interpret: as in `pallas_call`: False on a TPU.
        estimate: flops and bytes, for the compiler's scheduler.
    """

    inputs: BlockSparseInputs
    schedule: TpuSchedule
    interpret: Any
    estimate: pl.CostEstimate

    @property
    def _grid(self) -> RaggedGrid:
        return self.schedule.grid

    @property
    def _layout(self):
        return self.inputs.layout

    def cut_queries(self, q: Array, do=None, lse=None, delta=None) -> TpuQueries:
        """Arrays of the queries by block."""
        block, inputs = self._layout.block_q, self.inputs
        return TpuQueries(
            _to_blocks(q, block),
            None if do is None else _to_blocks(do, block),
            None if lse is None else _to_rows(lse, block, jnp.inf),
            None if delta is None else _to_rows(delta, block, 0),
            _to_lanes(inputs.q_positions, block, 0),
            _to_lanes(inputs.q_segment_ids, block, -1),
        )

    def cut_keys(self, k: Array, v: Array, transpose_values: bool = False) -> TpuKeys:
        """Arrays of the keys by block."""
        block, inputs = self._layout.block_kv, self.inputs
        v = _to_blocks(v, block)
        return TpuKeys(
            _to_blocks(k, block),
            v.swapaxes(1, 2) if transpose_values else v,
            _to_lanes(inputs.kv_positions, block, 0),
            _to_lanes(inputs.kv_segment_ids, block, -1),
        )

    def query_tokens(self, x: Array) -> Array:
        """[blocks, block_q, ...] -> [B, Tq, Hq, ...]."""
        return _to_tokens(x, self._grid.q_heads, self._grid.q_blocks, self._layout.q_tokens)

    def key_tokens(self, x: Array) -> Array:
        """[blocks, block_kv, ...] -> [B, Tk, Hk, ...]."""
        return _to_tokens(x, self._grid.kv_heads, self._grid.kv_blocks, self._layout.kv_tokens)

    def run(self, body: TpuKernelBody, outer, inner, results, scratch, *, keys_first: bool):
        """Run the kernel: launch after launch, each adding its rows to the results.

        Args:
            body: of the pass.
            outer, inner: a `TpuQueries` and a `TpuKeys`, or the other way round.
            results: (shape, dtype) of one block of each result.
            scratch: shapes of the float32 sums that stay in VMEM while a row is computed.
            keys_first: tiles of scores are [keys, queries].
        """
        grid, packed, like = self._grid, self.schedule.packed, self.inputs.q
        mask_blocks, mask_ids = self.schedule.mask_blocks(keys_first)
        inner = InnerArrays(inner, None if mask_blocks is None else jnp.asarray(mask_blocks))
        kernel = functools.partial(_kernel, self.schedule, body, len(results), keys_first)
        outputs: Any = []
        for launch in range(packed.sizes.launches):
            lists = ScalarLists(
                packed.entries[launch],
                mask_ids[launch],
                packed.starts[launch],
                packed.first_unmasked[launch],
                packed.bounds[launch],
                self.schedule.tables,
            )
            operands = outer, inner, outputs
            outputs = pl.pallas_call(
                kernel,
                out_shape=[result_shape((grid.rows, *x), dtype, like) for x, dtype in results],
                grid_spec=pltpu.PrefetchScalarGridSpec(
                    num_scalar_prefetch=len(lists),
                    grid=(packed.sizes.cores, grid.replicas, self.schedule.num_steps(launch)),
                    in_specs=[
                        self._outer_specs(outer),
                        *jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), operands[1:]),
                    ],
                    out_specs=[pl.BlockSpec((None, *x), self._outer_block) for x, _ in results],
                    scratch_shapes=[
                        [pltpu.VMEM(shape, jnp.float32) for shape in scratch],
                        jax.tree.map(self._double_buffer, inner),
                        pltpu.SemaphoreType.DMA(
                            (2, len(jax.tree.leaves(inner)), packed.sizes.slots)
                        ),
                    ],
                ),
                input_output_aliases=_aliases(lists, operands),
                compiler_params=pltpu.CompilerParams(
                    dimension_semantics=("parallel", "parallel", "arbitrary"),
                    # Lists are in range by construction, and every check costs bundles.
                    disable_bounds_checks=True,
                ),
                cost_estimate=self.estimate,
                interpret=self.interpret,
                name=f"block_sparse_{body.name}",
            )(*vary(tuple(map(jnp.asarray, lists)), axes_of(like)), *operands)
        return outputs

    def _double_buffer(self, x):
        """VMEM for two groups of blocks: one is computed while the other is prefetched."""
        return pltpu.VMEM((2, self.schedule.packed.sizes.slots, *x.shape[1:]), x.dtype)

    def _outer_block(self, core, replica, step, *lists):
        """Index map of the outer block of a row."""
        row, _ = _row_of(ScalarLists(*lists), core, step)
        return self._grid.outer_number(row, replica), 0, 0

    def _outer_specs(self, side):
        """Outer blocks by number, positions and segments by batch element."""

        def spec(name, x):
            if x is None:
                return None
            index = self._outer_block
            if name in _BY_BATCH:
                index = lambda *at: (
                    _index_by_batch(self._grid, x, self._outer_block(*at)[0], True), 0, 0
                )  # fmt: skip
            return pl.BlockSpec((None, *x.shape[1:]), index)

        return type(side)(*(spec(name, x) for name, x in side._asdict().items()))


_BY_BATCH = ("positions", "segments")


def _index_by_batch(grid: RaggedGrid, x, number, is_outer: bool):
    """Index of the positions or segments of a block: by batch element, or one for all."""
    heads, blocks = grid.inner_heads, grid.inner_blocks
    if is_outer:
        heads, blocks = grid.outer_heads, grid.outer_blocks
    block = remainder(number, blocks)
    if x.shape[0] == blocks:
        return block
    return quotient(number, heads * blocks) * blocks + block


def _row_of(lists: ScalarLists, core, step):
    """`(row, is_active)`: a core that is done stays on its last row.

    A kernel writes back the block that it leaves, so it must not leave a row for one that it does
    not compute.
    """
    row, last = lists.bounds[core] + step, lists.bounds[core + 1] - 1
    return jnp.minimum(row, last), row <= last


def _aliases(lists: ScalarLists, operands: tuple) -> dict[int, int]:
    """Each launch writes into the outputs of the launches before it."""
    *others, outputs = operands
    first = len(lists) + len(jax.tree.leaves(others))
    return {first + number: number for number in range(len(outputs))}


def _kernel(schedule: TpuSchedule, body: TpuKernelBody, results: int, keys_first: bool, *refs):
    """Compute one row: its outer block against all blocks that it lists.

    Grid    (core, replica, step); cores and replicas are independent, steps are rows in order.
    Reads   outer blocks of the row; the listed blocks group by group, by DMA: while one group is
            computed the next one is prefetched, also across rows.
    Loops   first over masked groups, then over unmasked ones, with the sums in scratch memory.
    Writes  the row's results, after its last group.
    """
    count = len(ScalarLists._fields)
    lists, (outer, inner, _, *rest) = ScalarLists(*refs[:count]), refs[count:]
    out, (scratch, buffers, semaphores) = rest[:results], rest[results:]
    core, replica, step = (pl.program_id(axis) for axis in range(3))
    row, is_active = _row_of(lists, core, step)
    base = lists.bounds[0]
    at, end = row - base, lists.starts[lists.bounds[core + 1] - base]
    offset = schedule.grid.inner_offset(replica)
    prefetch = Prefetch(schedule, lists, inner, buffers, semaphores, offset)
    outer_number = schedule.grid.outer_number(row, replica)

    @pl.when(step == 0)
    def _():
        prefetch.start(lists.starts[lists.bounds[core] - base])

    def take(is_masked: bool):
        def loop_body(group, _):
            prefetch.start(group + 1)
            prefetch.wait(group)
            blocks = prefetch.blocks(group)
            masks = GroupMasks(
                schedule,
                outer_number,
                prefetch.numbers(group),
                prefetch.entries(group),
                [block.mask_blocks for block in blocks],
                lists.tables,
                keys_first,
            )
            body.body(masks, outer, [block.side for block in blocks], scratch, is_masked)
            return 0

        return loop_body

    @pl.when(is_active)
    def _():
        body.prologue(outer, scratch)
        middle = lists.first_unmasked[at]
        lax.fori_loop(lists.starts[at], middle, take(True), 0)
        lax.fori_loop(middle, lists.starts[at + 1], take(False), 0)
        body.epilogue(out, scratch)

    @pl.when(is_active & (row == lists.bounds[core + 1] - 1))
    def _():
        prefetch.wait(end)  # drain the last prefetch


class Prefetch:
    """Double-buffered DMA of groups of blocks."""

    def __init__(
        self,
        schedule: TpuSchedule,
        lists: ScalarLists,
        inner: InnerArrays,
        buffers: InnerArrays,
        semaphores,
        offset,
    ):
        self._grid, self._slots = schedule.grid, schedule.packed.sizes.slots
        self._lists, self._buffers = lists, buffers
        self._semaphores, self._offset = semaphores, offset
        pairs = zip(_named(inner), _named(buffers), strict=True)
        self._arrays = [(name, source, buffer) for (name, source), (_, buffer) in pairs]

    def entries(self, group) -> list:
        """Entries of a group."""
        return [self._lists.entries[group * self._slots + slot] for slot in range(self._slots)]

    def numbers(self, group) -> list:
        """Numbers of a group's blocks."""
        return [(entry >> FLAG_BITS) + self._offset for entry in self.entries(group)]

    def start(self, group) -> None:
        """Start the DMA of a group."""
        for slot, number in enumerate(self.numbers(group)):
            for which, (name, source, _) in enumerate(self._arrays):
                index = number
                if name == "mask_blocks":
                    index = self._lists.mask_ids[group * self._slots + slot]
                elif name in _BY_BATCH:
                    index = _index_by_batch(self._grid, source, number, False)
                self._copy(group, slot, which, index).start()

    def wait(self, group) -> None:
        """Wait for the DMA of a group to complete."""
        for slot in range(self._slots):
            for which in range(len(self._arrays)):
                self._copy(group, slot, which, 0).wait()

    def _copy(self, group, slot: int, which: int, index):
        _, source, buffer = self._arrays[which]
        half = group & 1
        semaphore = self._semaphores.at[half, which, slot]
        return pltpu.make_async_copy(source.at[index], buffer.at[half, slot], semaphore)

    def blocks(self, group) -> list[InnerArrays]:
        """Refs of a group's blocks, slot by slot."""
        view = lambda slot: jax.tree.map(lambda x: x.at[group & 1, slot], self._buffers)
        return [view(slot) for slot in range(self._slots)]


def _named(inner: InnerArrays) -> list[tuple[str, Any]]:
    """Arrays that are not None, by name."""
    every = [*inner.side._asdict().items(), ("mask_blocks", inner.mask_blocks)]
    return [(name, x) for name, x in every if x is not None]


class GroupMasks:
    """Element masks of the blocks of a group.

    Args:
        schedule: of the pass.
        outer: number of the row's outer block.
        inner: numbers of the blocks.
        entries: their packed entries.
        mask_blocks: refs of their precomputed element masks, or None each.
        tables: integers of the mask program.
        keys_first: tiles of scores are [keys, queries].
    """

    def __init__(
        self, schedule: TpuSchedule, outer, inner, entries, mask_blocks, tables, keys_first: bool
    ):
        self._schedule, self._outer, self._inner, self._entries = schedule, outer, inner, entries
        self._mask_blocks, self._tables, self._keys_first = mask_blocks, tables, keys_first

    def element_mask(self, slot: int, queries: TpuQueries, keys: TpuKeys) -> Array:
        """Visible pairs of a slot, in the orientation of the pass's tiles."""
        layout, grid = self._schedule.layout, self._schedule.grid
        program = self._schedule.mask_program
        shape, q_axis, kv_axis = (layout.block_q, layout.block_kv), 0, 1
        if self._keys_first:
            shape, q_axis, kv_axis = shape[::-1], 1, 0
        q_number, kv_number = grid.q_and_kv(self._outer, self._inner[slot])
        kv_token = _token_index(kv_number, grid.kv_blocks, layout.block_kv, shape, kv_axis)
        q_token = _token_index(q_number, grid.q_blocks, layout.block_q, shape, q_axis)
        conditions = []
        if layout.kv_tokens % layout.block_kv:
            conditions.append(kv_token < layout.kv_tokens)
        if layout.q_tokens % layout.block_q:
            # Scores of padded queries may be NaN, like those of padded keys.
            conditions.append(q_token < layout.q_tokens)
        if isinstance(program, MaskProgram):
            q_pos = _along(queries.positions, shape, q_axis, q_token)
            kv_pos = _along(keys.positions, shape, kv_axis, kv_token)
            conditions.append(program.allows(q_pos, kv_pos, self._scalars(program, q_number)))
        if self._mask_blocks[slot] is not None:
            conditions.append(self._mask_blocks[slot][...].astype(jnp.int32) != 0)
        if queries.segments is not None:
            q_ids = _along(queries.segments, shape, q_axis)
            conditions.append((q_ids == _along(keys.segments, shape, kv_axis)) & (q_ids >= 0))
        is_live = _is_set(self._entries[slot], LIVE, shape)
        if not conditions:
            return is_live
        is_full = jnp.logical_not(_is_set(self._entries[slot], PARTIAL, shape))
        return is_live & (is_full | functools.reduce(and_, conditions))

    def _scalars(self, program: MaskProgram, q_number) -> list:
        """Integers of the mask program for the current head."""
        head = 0
        if program.heads > 1:
            q_heads = self._schedule.grid.q_heads
            head = quotient(self._schedule.grid.q_head(q_number), q_heads // program.heads)
        return [self._tables[row * program.heads + head] for row in range(len(program.rows))]


def _token_index(number, blocks: int, block: int, shape: tuple[int, int], axis: int):
    """Indices of a block's tokens along an axis of a tile."""
    return remainder(number, blocks) * block + lax.broadcasted_iota(jnp.int32, shape, axis)


def _is_set(entry, flag: int, shape: tuple[int, int]):
    """A flag as a tile: Mosaic does not broadcast scalar booleans."""
    return jnp.full(shape, entry & flag, jnp.int32) != 0


def _along(ref, shape: tuple[int, int], axis: int, default: Any = None) -> Any:
    """Integers [1, n] of a ref, broadcast along an axis of a tile."""
    if ref is None:
        return default
    numbers = ref[...]
    return jnp.broadcast_to(numbers, shape) if axis == 1 else to_column(numbers, shape[1])


def to_column(numbers: Array, width: int) -> Array:
    """[1, n] -> [n, width]: from lanes to sublanes."""
    return jnp.broadcast_to(numbers, (width, numbers.shape[1])).T


def _to_blocks(x: Array, block: int) -> Array:
    """[B, T, H, D] -> [B * H * N, block, D]."""
    batch, tokens, heads, dim = x.shape
    x = jnp.moveaxis(_pad(x, block, 0), 2, 1)
    return x.reshape(batch * heads * -(-tokens // block), block, dim)


def _to_rows(x: Array, block: int, fill) -> Array:
    """[B, T, H] -> [B * H * N, 1, block]."""
    return jnp.moveaxis(_pad(x, block, fill), 2, 1).reshape(-1, 1, block)


def _to_lanes(x: Array | None, block: int, fill: int) -> Array | None:
    """[B, T] -> [B * N, 1, block]; None stays None."""
    return None if x is None else _pad(x, block, fill).reshape(-1, 1, block)


def _pad(x: Array, block: int, fill) -> Array:
    missing = -x.shape[1] % block
    widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill) if missing else x


def _to_tokens(x: Array, heads: int, blocks: int, tokens: int) -> Array:
    """[B * H * N, block, ...] -> [B, T, H, ...]."""
    x = x.reshape(-1, heads, blocks * x.shape[1], *x.shape[2:])
    return jnp.moveaxis(x, 1, 2)[:, :tokens]
