"""Attention over pages for NVIDIA GPUs: a thread block computes a split of the list of one kv head.

Every page of a step is copied into shared memory by itself; the next step is prefetched while one
is computed. Products run on tensor cores, which take tiles of 64 rows: decoding has few rows, and
padding costs no memory traffic.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.mosaic_gpu import ampere, kernels
from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.mosaic_gpu.launch import STAGES
from xsake.kernels.block_sparse.mosaic_gpu.ops import Ref, Scalar
from xsake.kernels.block_sparse.mosaic_gpu.schedule import OUTER_TILE
from xsake.kernels.lowering import capability_of
from xsake.kernels.mask_program import MaskProgram, trace_mask
from xsake.kernels.paged_decode import splits
from xsake.kernels.paged_decode.splits import SplitCall, SplitSizes
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs
from xsake.kernels.sharding import axes_of, vary
from xsake.layout.numbering import quotient, remainder

# Features up to, keys of a step: the most that registers hold without spilling, by certificates.
STEP_KEYS = ((128, 64), (kernels.MAX_FEATURES, 32))
# Tiles of 64 tokens are converted to 16 bits.
MAX_INT8_FEATURES = 128
# Fixed, so that the bits of a sequence do not depend on its batch.
SPLIT_KEYS = 512
# A copy into shared memory moves whole swizzled tiles of 8 tokens, by four warps.
COPY_BYTES = 4 * 8 * gpu.SWIZZLE


def unsupported_reason(inputs: PagedInputs, config: PagedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call on an NVIDIA GPU; None if it can."""
    dtype, size = inputs.q.dtype, inputs.page_size
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"its tensor cores take bfloat16 and float16, not {dtype}"
    limit = MAX_INT8_FEATURES if inputs.k.dtype == jnp.int8 else kernels.MAX_FEATURES
    if _features(inputs) > limit:
        return f"its registers hold heads of at most {limit} features of {inputs.k.dtype} pages"
    step = _step_keys(inputs)
    if size % 8 or step % size:
        return f"a step of {step} tokens is not made of whole pages of {size} tokens"
    for x in (inputs.k, inputs.v):
        row = x.shape[-1] * x.dtype.itemsize
        if row % gpu.SWIZZLE or size * row % COPY_BYTES:
            return (
                f"it copies pages of whole KiB with rows of whole {gpu.SWIZZLE} bytes, "
                f"not {size} tokens of {row} bytes"
            )
    program = trace_mask(config.mask)
    if isinstance(program, str):
        return program
    return ampere.capability_reason(capability_of(platform) or gpu.capability())


def make_sizes(inputs: PagedInputs) -> SplitSizes:
    """Sizes of a call."""
    step = _step_keys(inputs)
    return splits.make_sizes(inputs, step, SPLIT_KEYS, OUTER_TILE, OUTER_TILE, is_whole=True)


def _features(inputs: PagedInputs) -> int:
    return max(inputs.k.shape[-1], inputs.v.shape[-1])


def _step_keys(inputs: PagedInputs) -> int:
    return next(keys for limit, keys in STEP_KEYS if _features(inputs) <= limit)


class _SharedMemory(NamedTuple):
    """Shared memory of a thread block: types, or refs."""

    q: Any  # [rows, D]
    k: Any  # [stages, keys, D]
    v: Any  # [stages, keys, Dv]
    converted: list[Any]  # k [keys, D] and v [keys, Dv] of a step in 16 bits, if pages are int8
    q_barriers: list[Any]
    kv_barriers: list[Any]


def _launch(
    inputs: PagedInputs, config: PagedConfig, program: MaskProgram, interpret: Any
) -> tuple[Array, Array]:
    """o [heads, splits, rows, Dv] and lse [heads, splits, rows] of all splits."""
    sizes = make_sizes(inputs)
    call = splits.cut_call(inputs, sizes, program)
    capability = None if interpret else gpu.capability()
    ops = gpu.GpuOps(capability is None or capability[0] >= 9, interpret or None)
    (heads, _, dim), keys = call.q.shape, sizes.slots * inputs.page_size
    pools = inputs.k, inputs.v
    operands, tree = jax.tree.flatten((call, *pools))
    k, v = (gpu.shared((STAGES, keys, x.shape[-1]), x.dtype, ops) for x in pools)
    converted = [gpu.shared((keys, x.shape[-1]), inputs.q.dtype, ops) for x in pools]
    scratch, scratch_tree = jax.tree.flatten(
        _SharedMemory(
            gpu.shared((sizes.tile, dim), inputs.q.dtype, ops),
            k,
            v,
            [] if inputs.k_scale is None else converted,
            ops.barriers(1),
            ops.barriers(2 * sizes.slots, STAGES),
        )
    )

    def kernel(number: Scalar, *refs: Ref) -> None:
        given, (o, lse, *memory) = refs[: len(operands)], refs[len(operands) :]
        call, k_pool, v_pool = jax.tree.unflatten(tree, given)
        shared = jax.tree.unflatten(scratch_tree, memory)
        split = _Split(config, sizes, program, ops, number, call, k_pool, v_pool, shared)
        split.run(o, lse)

    shape = heads, sizes.splits, sizes.rows
    run = gpu.launch(
        kernel,
        [jax.ShapeDtypeStruct(x, jnp.float32) for x in ((*shape, inputs.v.shape[-1]), shape)],
        scratch,
        heads * sizes.splits * sizes.tiles,
        name="paged_decode",
        interpret=ops.interpret,
        groups=gpu.WarpGroups(),
    )
    axes = axes_of(inputs.q)
    # Results of Mosaic GPU lack the mesh axes that they vary over.
    o, lse = vary(run(*vary(operands, axes)), axes)
    return o, lse


forward = splits.define_forward(_launch)


class _Split(NamedTuple):
    """A thread block: a tile of rows over one split.

    Programs  (kv head of a sequence, split, tile of rows), tiles fastest; all independent.
    Reads     its tile of queries; the pages of the split, step by step. Slots without a page copy
              the first page of the pool, whose keys have no position.
    Writes    o [tile, Dv] and lse [tile] over the keys of the split.
    """

    config: PagedConfig
    sizes: SplitSizes
    program: MaskProgram
    ops: gpu.GpuOps
    number: Scalar
    call: SplitCall
    k_pool: Ref
    v_pool: Ref
    memory: _SharedMemory

    def run(self, o: Ref, lse: Ref) -> None:
        """Online softmax; s [rows, keys]."""
        call, memory, ops, sizes = self.call, self.memory, self.ops, self.sizes
        tile, rest = remainder(self.number, sizes.tiles), quotient(self.number, sizes.tiles)
        split, head = remainder(rest, sizes.splits), quotient(rest, sizes.splits)
        rows = pl.ds(tile * sizes.tile, sizes.tile)
        at = quotient(head, call.q.shape[0] // call.page.shape[0]), split
        first, stop = call.bounds[*at, 0], call.bounds[*at, 1]
        ops.copy(call.q.at[head, rows], memory.q, memory.q_barriers)
        pl.when(first < stop)(lambda: self._prefetch(at, head, first))
        ops.wait(memory.q_barriers)
        row_integers = [
            gpu.vector(call.row_integers.at[head, i, rows], 0)
            for i in range(call.row_integers.shape[1])
        ]

        def body(step: Scalar, state: kernels.State) -> kernels.State:
            slot = lax.rem(step, STAGES)
            ops.wait(memory.kv_barriers, slot)
            pl.when(step + 1 < stop)(lambda: self._prefetch(at, head, step + 1))
            k, v = self._load(slot)
            s, v_scale = self._scores(k, v, (head, split, step))
            position = gpu.along(gpu.vector(call.position.at[*at, step], 1), s.shape, 1)
            integers = [gpu.along(x, s.shape, 0) for x in row_integers]
            mask = splits.visible_pairs(self.program, integers, position)
            s = jnp.where(mask, s, -jnp.inf)
            acc, m, l = state
            m, m_safe, alpha = online_softmax.rescale(m, jnp.max(s, 1), kernels.BASE)
            p = jnp.exp2(s - gpu.along(m_safe, s.shape, 0))
            l = l * alpha + jnp.sum(p, 1)
            p = p if v_scale is None else p * v_scale
            acc = acc * gpu.along(alpha, acc.shape, 0)
            acc = ops.add_product(acc, p, v, zero_nonfinite=v_scale is None)
            ops.release()
            return acc, m, l

        zero = gpu.full((sizes.tile, self.v_pool.shape[-1]), 0.0)
        state = zero, gpu.full((sizes.tile,), -jnp.inf), gpu.full((sizes.tile,), 0.0)
        acc, m, l = lax.fori_loop(first, stop, body, state)
        gpu.store(o.at[head, split, rows], acc / gpu.along(jnp.where(l != 0, l, 1.0), acc.shape, 0))
        gpu.store(lse.at[head, split, rows], online_softmax.log_sum_exp(m, l, kernels.BASE))

    def _prefetch(self, at: tuple[Scalar, Scalar], head: Scalar, step: Scalar) -> None:
        """Start the copies of the pages of a step."""
        stage, size = lax.rem(step, STAGES), self.k_pool.shape[2]
        kv_head = lax.rem(head, self.k_pool.shape[1])
        pools = (self.k_pool, self.memory.k), (self.v_pool, self.memory.v)
        for slot in range(self.sizes.slots):
            page = jnp.maximum(self.call.page[*at, step * self.sizes.slots + slot], 0)
            for pool, buffer in pools:
                target = buffer.at[stage, pl.ds(slot * size, size)]
                self.ops.copy(pool.at[page, kv_head], target, self.memory.kv_barriers, stage)

    def _load(self, slot: Scalar) -> tuple[Ref, Ref]:
        """Keys and values of a step in shared memory, in 16 bits."""
        memory = self.memory
        tiles = memory.k.at[slot], memory.v.at[slot]
        if not memory.converted:
            return tiles
        self.ops.convert(tiles, memory.converted)
        return memory.converted[0], memory.converted[1]

    def _scores(self, k: Ref, v: Ref, at: tuple[Scalar, ...]) -> tuple[Array, Any]:
        """Scores in base 2, NaN where values are not finite, and the factors of int8 values."""
        ops, call = self.ops, self.call
        s, v_scale = ops.dot_products(self.memory.q, k), None
        if call.k_scale is None:
            s = ops.mark_nonfinite(s, v)
        else:
            along = lambda ref: gpu.along(gpu.vector(ref.at[*at], 1), s.shape, 1)
            k_scale, v_scale = along(call.k_scale), along(call.v_scale)
            is_finite = jnp.abs(v_scale) < jnp.inf
            s, v_scale = (
                jnp.where(is_finite, x, other)
                for x, other in ((s * k_scale, jnp.nan), (v_scale, 0.0))
            )
        return kernels.to_scores(s, self.config.scale, self.config.softcap), v_scale
