"""Launch of TPU kernels over a schedule: blocks, index maps, grid, prefetch.

Every array is cut into blocks first, [blocks, ...], so that one block is one index and its last two
axes are whole: then any block size and any head dimension can be tiled. Statistics, positions and
segments are [blocks, 1, block]. `outer` is the side that owns a row, `inner` the side that its
items name.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels.block_sparse.mosaic_tpu.masking import GroupMasks, Ref, Scalar
from xsake.kernels.block_sparse.mosaic_tpu.schedule import FLAG_BITS, TpuSchedule
from xsake.kernels.block_sparse.types import BlockSparseInputs
from xsake.kernels.blocking import KeyArrays, QueryArrays
from xsake.kernels.mask_program import flat_tables
from xsake.kernels.online_softmax import BackwardRows
from xsake.kernels.sharding import axes_of, result_shape, vary
from xsake.layout.numbering import RaggedGrid, quotient, remainder

type Refs = Sequence[Any]


class TpuKernelBody(NamedTuple):
    """Computation of a row.

    name: of the pass, as profiles show it.
    prologue(outer, scratch): initialize.
    body(masks, outer, inner, scratch, is_masked): one group of blocks.
    epilogue(results, scratch): write the results of the row.
    """

    name: str
    prologue: Callable[[Any, Refs], None]
    body: Callable[..., None]
    epilogue: Callable[[Refs, Refs], None]


class InnerArrays(NamedTuple):
    """Arrays that are prefetched with the blocks of a schedule."""

    side: Any  # `QueryArrays` or `KeyArrays`
    mask_blocks: Any  # element masks, or None


class ScalarLists(NamedTuple):
    """Lists of a launch in scalar memory."""

    entries: Ref
    mask_ids: Ref
    starts: Ref
    first_unmasked: Ref
    bounds: Ref
    tables: Ref


@dataclasses.dataclass(frozen=True, eq=False)
class TpuLaunch:
    """One pass of a call over a schedule."""

    inputs: BlockSparseInputs  # of the call
    schedule: TpuSchedule  # of the pass
    interpret: Any  # as in `pallas_call`: False on a TPU
    estimate: pl.CostEstimate  # flops and bytes, for the compiler's scheduler

    def cut_queries(self, q: Array, rows: BackwardRows | None = None) -> QueryArrays:
        """Arrays of the queries by block."""
        block, inputs, residuals = self.inputs.layout.block_q, self.inputs, (None, None, None)
        q = _to_blocks(q, block)
        if rows is not None:
            do, lse = _to_blocks(rows.do, block), _to_rows(rows.lse, block, jnp.inf)
            residuals = do, lse, _to_rows(rows.delta, block, 0)
        positions = _to_lanes(inputs.q_positions, block, 0)
        return QueryArrays(q, *residuals, positions, _to_lanes(inputs.q_segment_ids, block, -1))

    def cut_keys(self, k: Array, v: Array, transpose_values: bool = False) -> KeyArrays:
        """Arrays of the keys by block."""
        block, inputs = self.inputs.layout.block_kv, self.inputs
        v = _to_blocks(v, block)
        return KeyArrays(
            _to_blocks(k, block),
            v.swapaxes(1, 2) if transpose_values else v,
            None,
            _to_lanes(inputs.kv_positions, block, 0),
            _to_lanes(inputs.kv_segment_ids, block, -1),
        )

    def query_tokens(self, x: Array) -> Array:
        """[blocks, block_q, ...] -> [B, Tq, Hq, ...]."""
        grid = self.schedule.grid
        return _to_tokens(x, grid.q_heads, grid.q_blocks, self.inputs.layout.q_tokens)

    def key_tokens(self, x: Array) -> Array:
        """[blocks, block_kv, ...] -> [B, Tk, Hk, ...]."""
        grid = self.schedule.grid
        return _to_tokens(x, grid.kv_heads, grid.kv_blocks, self.inputs.layout.kv_tokens)

    def run(
        self,
        body: TpuKernelBody,
        outer: QueryArrays | KeyArrays,
        inner: QueryArrays | KeyArrays,
        results: Sequence[tuple[tuple[int, int], Any]],
        scratch: Sequence[tuple[int, int]],
        *,
        keys_first: bool,
    ) -> Sequence[Array]:
        """Run the kernel: launch after launch, each adding its rows to the results.

        `results` are (shape, dtype) of one block each, `scratch` shapes of the float32 sums that
        stay in VMEM while a row is computed. `keys_first`: tiles of scores are [keys, queries].
        """
        grid, packed, like = self.schedule.grid, self.schedule.packed, self.inputs.q
        mask_blocks, mask_ids = self.schedule.mask_blocks(keys_first)
        arrays = InnerArrays(inner, None if mask_blocks is None else jnp.asarray(mask_blocks))
        kernel = functools.partial(_kernel, self.schedule, body, len(results), keys_first)
        outputs: Any = []
        for launch in range(packed.sizes.launches):
            lists = ScalarLists(
                packed.entries[launch],
                mask_ids[launch],
                packed.starts[launch],
                packed.first_unmasked[launch],
                packed.bounds[launch],
                flat_tables(self.schedule.mask_program),
            )
            operands = outer, arrays, outputs
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
                        jax.tree.map(self._double_buffer, arrays),
                        pltpu.SemaphoreType.DMA(
                            (2, len(jax.tree.leaves(arrays)), packed.sizes.slots)
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

    def _double_buffer(self, x: Array) -> Any:
        """VMEM for two groups of blocks: one is computed while the other is prefetched."""
        return pltpu.VMEM((2, self.schedule.packed.sizes.slots, *x.shape[1:]), x.dtype)

    def _outer_block(
        self, core: Scalar, replica: Scalar, step: Scalar, *lists: Ref
    ) -> tuple[Scalar, int, int]:
        """Index map of the outer block of a row."""
        row, _ = _row_of(ScalarLists(*lists), core, step)
        return self.schedule.grid.outer_number(row, replica), 0, 0

    def _outer_specs(self, side: QueryArrays | KeyArrays) -> QueryArrays | KeyArrays:
        """Outer blocks by number, positions and segments by batch element."""

        def spec(name: str, x: Array | None) -> pl.BlockSpec | None:
            if x is None:
                return None
            index = self._outer_block
            if name in _BY_BATCH:
                index = lambda *at: (
                    _index_by_batch(self.schedule.grid, x, self._outer_block(*at)[0], True), 0, 0
                )  # fmt: skip
            return pl.BlockSpec((None, *x.shape[1:]), index)

        return type(side)(*(spec(name, x) for name, x in side._asdict().items()))


_BY_BATCH = ("positions", "segments")


def _index_by_batch(grid: RaggedGrid, x: Ref, number: Scalar, is_outer: bool) -> Scalar:
    """Index of the positions or segments of a block: by batch element, or one for all."""
    outer, inner = (grid.outer_heads, grid.outer_blocks), (grid.inner_heads, grid.inner_blocks)
    heads, blocks = outer if is_outer else inner
    block = remainder(number, blocks)
    return block if x.shape[0] == blocks else quotient(number, heads * blocks) * blocks + block


def _row_of(lists: ScalarLists, core: Scalar, step: Scalar) -> tuple[Scalar, Scalar]:
    """`(row, is_active)`: a core that is done stays on its last row.

    A kernel writes back the block that it leaves, so it must not leave a row for one that it does
    not compute.
    """
    row, last = lists.bounds[core] + step, lists.bounds[core + 1] - 1
    return jnp.minimum(row, last), row <= last


def _aliases(lists: ScalarLists, operands: tuple[Any, ...]) -> dict[int, int]:
    """Each launch writes into the outputs of the launches before it."""
    *others, outputs = operands
    first = len(lists) + len(jax.tree.leaves(others))
    return {first + number: number for number in range(len(outputs))}


def _kernel(
    schedule: TpuSchedule, body: TpuKernelBody, results: int, keys_first: bool, *refs: Ref
) -> None:
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

    def take(is_masked: bool) -> Callable[..., int]:
        def loop_body(group: Scalar, _: Any) -> int:
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


@dataclasses.dataclass(frozen=True, eq=False)
class Prefetch:
    """Double-buffered DMA of groups of blocks."""

    schedule: TpuSchedule
    lists: ScalarLists
    inner: InnerArrays
    buffers: InnerArrays
    semaphores: Ref
    offset: Scalar  # of the replica on the numbers of blocks

    @property
    def _slots(self) -> int:
        return self.schedule.packed.sizes.slots

    @property
    def _arrays(self) -> list[tuple[str, Ref, Ref]]:
        """`(name, source, buffer)` of the arrays that exist."""
        pairs = zip(_by_name(self.inner), _by_name(self.buffers), strict=True)
        return [(name, x, buffer) for (name, x), (_, buffer) in pairs if x is not None]

    def entries(self, group: Scalar) -> list[Scalar]:
        """Entries of a group."""
        return [self.lists.entries[group * self._slots + slot] for slot in range(self._slots)]

    def numbers(self, group: Scalar) -> list[Scalar]:
        """Numbers of a group's blocks."""
        return [(entry >> FLAG_BITS) + self.offset for entry in self.entries(group)]

    def start(self, group: Scalar) -> None:
        """Start the DMA of a group."""
        for slot, number in enumerate(self.numbers(group)):
            for which, (name, source, _) in enumerate(self._arrays):
                index = number
                if name == "mask_blocks":
                    index = self.lists.mask_ids[group * self._slots + slot]
                elif name in _BY_BATCH:
                    index = _index_by_batch(self.schedule.grid, source, number, False)
                self._copy(group, slot, which, index).start()

    def wait(self, group: Scalar) -> None:
        """Wait for the DMA of a group to complete."""
        for slot in range(self._slots):
            for which in range(len(self._arrays)):
                self._copy(group, slot, which, 0).wait()

    def _copy(self, group: Scalar, slot: int, which: int, index: Scalar) -> Any:
        _, source, buffer = self._arrays[which]
        half = group & 1
        semaphore = self.semaphores.at[half, which, slot]
        return pltpu.make_async_copy(source.at[index], buffer.at[half, slot], semaphore)

    def blocks(self, group: Scalar) -> list[InnerArrays]:
        """Refs of a group's blocks, slot by slot."""
        view = lambda slot: jax.tree.map(lambda x: x.at[group & 1, slot], self.buffers)
        return [view(slot) for slot in range(self._slots)]


def _by_name(inner: InnerArrays) -> list[tuple[str, Ref]]:
    return [*inner.side._asdict().items(), ("mask_blocks", inner.mask_blocks)]


def _to_blocks(x: Array, block: int) -> Array:
    """[B, T, H, D] -> [B * H * N, block, D]."""
    batch, tokens, heads, dim = x.shape
    x = jnp.moveaxis(_pad(x, block, 0), 2, 1)
    return x.reshape(batch * heads * -(-tokens // block), block, dim)


def _to_rows(x: Array, block: int, fill: int | float) -> Array:
    """[B, T, H] -> [B * H * N, 1, block]."""
    return jnp.moveaxis(_pad(x, block, fill), 2, 1).reshape(-1, 1, block)


def _to_lanes(x: Array | None, block: int, fill: int) -> Array | None:
    """[B, T] -> [B * N, 1, block]; None stays None."""
    return None if x is None else _pad(x, block, fill).reshape(-1, 1, block)


def _pad(x: Array, block: int, fill: int | float) -> Array:
    missing = -x.shape[1] % block
    widths = [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, widths, constant_values=fill) if missing else x


def _to_tokens(x: Array, heads: int, blocks: int, tokens: int) -> Array:
    """[B * H * N, block, ...] -> [B, T, H, ...]."""
    x = x.reshape(-1, heads, blocks * x.shape[1], *x.shape[2:])
    return jnp.moveaxis(x, 1, 2)[:, :tokens]
