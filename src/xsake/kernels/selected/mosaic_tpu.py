"""Selected attention for TPUs, kv-major: one grid step per tile of queries that selected a block.

XLA gathers the queries of a chunk's tiles; the number of a tile's block is prefetched. Tiles of one
block are neighbours, so its keys and values are copied once, and its gradients stay in VMEM until
the next block begins. Scores are [keys, rows]: statistics over keys lie along lanes, and reductions
never cross lanes.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels import online_softmax as softmax
from xsake.kernels.online_softmax import zero_nonfinite
from xsake.kernels.selected import chunking
from xsake.kernels.selected.chunking import (
    ChunkResiduals,
    ChunkTiles,
    PartialSoftmax,
    SelectedTuning,
    TileGradients,
)
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs
from xsake.kernels.sharding import result_shape

type Ref = Any  # memory that a kernel reads by `ref[...]`

TUNING = SelectedTuning(rows=512, tiles=1, queries=4096)
LAUNCHES = {"selected_forward": 1, "selected_backward": 1}  # of a chunk
LN_2 = 0.6931471805599453


def unsupported_reason(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call on a TPU; None if it can."""
    dtype, known = inputs.q.dtype, (jnp.float32, jnp.bfloat16)
    return None if dtype in known else f"TPUs compute in float32 and bfloat16, not in {dtype}"


def _dot(a: Array, b: Array, over: tuple[int, int], dtype: Any) -> Array:
    """Sum of `a` times `b` over one axis of each, in float32, inputs in the caller's dtype."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((over[0],), (over[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _scores(block: Array, q: Array, k: Array, position: Array, factor: float, dtype: Any) -> Array:
    """[keys, rows] in base 2, -inf for masked pairs."""
    s = _dot(k, q, (1, 1), dtype) * factor
    size, rows = s.shape
    key = block * size + lax.broadcasted_iota(jnp.int32, (size, rows), 0)
    return jnp.where(key <= position, s, -jnp.inf)


def _exp2(x: Array) -> Array:
    """2^x: TPUs have an instruction for e^x only."""
    return jnp.exp(x * LN_2)


def _forward_kernel(
    block_ref: Ref, total_ref: Ref, q_ref: Ref, position_ref: Ref, k_ref: Ref, v_ref: Ref,
    acc_ref: Ref, m_ref: Ref, l_ref: Ref, *, factor: float, dtype: Any,
) -> None:  # fmt: skip
    """One tile of queries and its block.

    Grid    (tile), in order; tiles of one block are neighbours.
    Reads   q [rows, D], positions [1, rows]; k [block, D], v [block, Dv] of the tile's block.
    Writes  the partial softmax of every row: acc [rows, Dv], m and l [1, rows].
    """
    tile = pl.program_id(0)
    is_used = tile < total_ref[0]

    @pl.when(is_used)
    def _():
        s = _scores(block_ref[tile], q_ref[...], k_ref[...], position_ref[...], factor, dtype)
        m = s.max(0, keepdims=True)
        p = _exp2(s - jnp.where(m == -jnp.inf, 0.0, m))
        acc_ref[...] = _dot(p, v_ref[...], (0, 0), dtype)
        m_ref[...] = m
        l_ref[...] = p.sum(0, keepdims=True)

    @pl.when(jnp.logical_not(is_used))
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)
        m_ref[...] = jnp.full_like(m_ref, -jnp.inf)
        l_ref[...] = jnp.zeros_like(l_ref)


def _backward_kernel(
    block_ref: Ref, total_ref: Ref, q_ref: Ref, position_ref: Ref, do_ref: Ref, lse_ref: Ref,
    delta_ref: Ref, k_ref: Ref, v_ref: Ref, dq_ref: Ref, dk_ref: Ref, dv_ref: Ref,
    *, factor: float, dtype: Any,
) -> None:  # fmt: skip
    """One tile of queries and its block.

    Grid    (tile), in order; tiles of one block are neighbours.
    Reads   q [rows, D], do [rows, Dv], positions, lse and delta [1, rows]; k and v of the block.
    Writes  dq [rows, D] of the tile; adds to dk [block, D] and dv [block, Dv] of the block.
    """
    tile = pl.program_id(0)
    before = block_ref[jnp.maximum(tile - 1, 0)]

    @pl.when((tile == 0) | (block_ref[tile] != before))
    def _():
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    @pl.when(tile < total_ref[0])
    def _():
        q, k, v, do = q_ref[...], k_ref[...], v_ref[...], do_ref[...]
        # TPUs have isfinite in float32 only.
        finite = lambda x: zero_nonfinite(x.astype(jnp.float32))
        s = _scores(block_ref[tile], q, k, position_ref[...], factor, dtype)
        p = jnp.where(s == -jnp.inf, 0.0, _exp2(s - lse_ref[...]))
        dp = _dot(v, do, (1, 1), dtype)
        ds = jnp.where(s == -jnp.inf, 0.0, p * (dp - delta_ref[...]))
        dq_ref[...] = _dot(ds, finite(k), (0, 0), dtype)
        dk_ref[...] += _dot(ds, finite(q), (1, 0), dtype)
        dv_ref[...] += _dot(p, finite(do), (1, 0), dtype)

    @pl.when(tile >= total_ref[0])
    def _():
        dq_ref[...] = jnp.zeros_like(dq_ref)


def _launch(
    kernel: Callable[..., None],
    name: str,
    call: ChunkTiles,
    rows: Sequence[Array],
    by_tile: Sequence[tuple[int, ...]],
    by_block: Sequence[tuple[int, ...]] = (),
) -> Sequence[Array]:
    """Run a kernel over the tiles of a chunk: `rows` [slots, ...] by tile, then keys and values.

    `by_tile` and `by_block` are shapes of one tile's results, and of one block's.
    """
    chunk, slots = call.chunk, call.sizes.slots
    kv = chunk.k.astype(call.dtype), chunk.v.astype(call.dtype)
    inputs, (number, size, _) = (*rows, *kv), chunk.k.shape
    tile_spec = lambda shape: pl.BlockSpec((None, *shape), lambda tile, *lists: (tile, 0, 0))
    block_spec = lambda shape: pl.BlockSpec(
        (None, *shape), lambda tile, block_ref, *lists: (block_ref[tile], 0, 0)
    )
    shapes = [(slots, *shape) for shape in by_tile] + [(number, *shape) for shape in by_block]
    factor = softmax.query_factor(call.config.scale, None)
    in_specs = [tile_spec(x.shape[1:]) for x in rows] + [block_spec(x.shape[1:]) for x in kv]
    return pl.pallas_call(
        functools.partial(kernel, factor=factor, dtype=call.dtype),
        out_shape=[result_shape(shape, jnp.float32, inputs[0]) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(slots,),
            in_specs=in_specs,
            out_specs=[*map(tile_spec, by_tile), *map(block_spec, by_block)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * slots * call.sizes.rows * sum(x.shape[-1] for x in inputs) * size,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in inputs),
            transcendentals=slots * call.sizes.rows * size,
        ),
        interpret=call.interpret,
        name=f"selected_{name}",
    )(call.slot_blocks(), call.tiles.total.reshape(1).astype(jnp.int32), *inputs)


def visit_forward(call: ChunkTiles, partial: PartialSoftmax) -> PartialSoftmax:
    """Partial softmaxes of all tiles of a chunk, in one launch."""
    del partial  # every tile is written
    rows = call.gather_rows(call.chunk.q), call.position_rows()
    line = 1, call.sizes.rows
    results = (call.sizes.rows, call.chunk.v.shape[-1]), line, line
    acc, m, l = _launch(_forward_kernel, "forward", call, rows, results)
    return PartialSoftmax(acc, m[:, 0], l[:, 0])


def visit_backward(
    call: ChunkTiles, residuals: ChunkResiduals, sums: TileGradients
) -> TileGradients:
    """Gradients of all tiles of a chunk, in one launch."""
    slots, rows, chunk, tiles = call.sizes.slots, call.sizes.rows, call.chunk, call.tiles
    in_line = lambda x: call.gather_rows(x).reshape(slots, 1, rows)
    given = (
        call.gather_rows(chunk.q),
        call.position_rows(),
        call.gather_rows(residuals.do),
        in_line(residuals.lse),
        in_line(residuals.delta),
    )
    number, blocks = chunk.k.shape[0], (chunk.k.shape[1:], chunk.v.shape[1:])
    results = [(rows, chunk.k.shape[-1])]
    dq, dk, dv = _launch(_backward_kernel, "backward", call, given, results, blocks)
    # A block that no query selected was never written.
    used = jnp.arange(call.sizes.capacity) < tiles.total
    is_written = jnp.zeros(number + 1, bool).at[jnp.where(used, tiles.block, number)].set(True)
    is_written = is_written[:number, None, None]
    dk, dv = (jnp.where(is_written, x, 0) for x in (dk, dv))
    return TileGradients(dq, sums.dk + dk, sums.dv + dv)


forward, backward = chunking.define_backend(lambda platform: TUNING, visit_forward, visit_backward)
