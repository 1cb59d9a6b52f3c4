"""Selected attention for TPUs, kv-major: one grid step per tile of queries that selected a block.

XLA gathers the queries of a chunk's tiles; the number of a tile's block is prefetched. Tiles of one
block are neighbours, so its keys and values are copied once, and its gradients stay in VMEM until
the next block begins. Scores are [keys, rows]: statistics over keys lie along lanes, and reductions
never cross lanes.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from xsake.kernels import online_softmax as softmax
from xsake.kernels.batching import result_shape
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.online_softmax import zero_nonfinite
from xsake.kernels.selected import chunking
from xsake.kernels.selected.chunking import (
    Chunk,
    ChunkResiduals,
    ChunkSizes,
    PartialSoftmax,
    SelectedTuning,
    chunk_sizes,
    gather_rows,
    position_rows,
)
from xsake.kernels.selected.routing import QueryTiles
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs

TUNING = SelectedTuning(rows=512, tiles=1, queries=4096)
LAUNCHES = {"selected_forward": 1, "selected_backward": 1}  # of a chunk
LN_2 = 0.6931471805599453


def unsupported_reason(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call on a TPU; None if it can."""
    dtype = inputs.q.dtype
    if dtype not in (jnp.float32, jnp.bfloat16):
        return f"TPUs compute in float32 and bfloat16, not in {dtype}"
    return None


def forward(inputs: SelectedInputs, config: SelectedConfig, platform: str, interpret: Any = False):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    cut = chunk_sizes(inputs, config, TUNING)
    visit = functools.partial(visit_forward, cut, config, inputs.q.dtype, interpret)
    return chunking.forward(inputs, config, cut, visit)


def backward(
    inputs: SelectedInputs,
    config: SelectedConfig,
    platform: str,
    o: Array,
    lse: Array,
    do: Array,
    dlse: Array,
    interpret: Any = False,
) -> Gradients:
    """Gradients for q, k and v, with probabilities recomputed once."""
    cut = chunk_sizes(inputs, config, TUNING)
    visit = functools.partial(visit_backward, cut, config, inputs.q.dtype, interpret)
    return chunking.backward(inputs, config, cut, visit, (o, lse), (do, dlse))


def _dot(a, b, over: tuple[int, int], dtype):
    """Sum of `a` times `b` over one axis of each, in float32, inputs in the caller's dtype."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        a.astype(dtype),
        b.astype(dtype),
        (((over[0],), (over[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _scores(block, q, k, position, factor: float, dtype):
    """[keys, rows] in base 2, -inf for masked pairs."""
    s = _dot(k, q, (1, 1), dtype) * factor
    size, rows = s.shape
    key = block * size + lax.broadcasted_iota(jnp.int32, (size, rows), 0)
    return jnp.where(key <= position, s, -jnp.inf)


def _exp2(x):
    """2^x: TPUs have an instruction for e^x only."""
    return jnp.exp(x * LN_2)


def _forward_kernel(
    block_ref, total_ref, q_ref, position_ref, k_ref, v_ref, acc_ref, m_ref, l_ref,
    *, factor: float, dtype,
):  # fmt: skip
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
    block_ref, total_ref, q_ref, position_ref, do_ref, lse_ref, delta_ref, k_ref, v_ref,
    dq_ref, dk_ref, dv_ref, *, factor: float, dtype,
):  # fmt: skip
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


def _scalar_lists(tiles: QueryTiles, cut: ChunkSizes):
    """The block of every tile, and the number of used tiles; unused ones stay at the last block."""
    last = jnp.maximum(tiles.total - 1, 0)
    used = jnp.minimum(jnp.arange(cut.slots, dtype=jnp.int32), last)
    return tiles.block[used], tiles.total.reshape(1).astype(jnp.int32)


def _tile_spec(*shape: int) -> pl.BlockSpec:
    """BlockSpec of arrays by tile."""
    return pl.BlockSpec((None, *shape), lambda tile, *lists: (tile, 0, 0))


def _block_spec(*shape: int) -> pl.BlockSpec:
    """BlockSpec of arrays by block."""
    return pl.BlockSpec((None, *shape), lambda tile, block_ref, *lists: (block_ref[tile], 0, 0))


def _launch(kernel, name: str, cut: ChunkSizes, specs: tuple, shapes, interpret, lists, inputs):
    arithmetic = pl.CostEstimate(
        flops=2 * cut.slots * cut.rows * sum(x.shape[-1] for x in inputs) * inputs[-1].shape[1],
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in inputs),
        transcendentals=cut.slots * cut.rows * inputs[-1].shape[1],
    )
    in_specs, out_specs = specs
    return pl.pallas_call(
        kernel,
        out_shape=[result_shape(shape, jnp.float32, inputs[0]) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(lists),
            grid=(cut.slots,),
            in_specs=list(in_specs),
            out_specs=list(out_specs),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=arithmetic,
        interpret=interpret,
        name=f"selected_{name}",
    )(*lists, *inputs)


def visit_forward(
    cut: ChunkSizes,
    config: SelectedConfig,
    dtype,
    interpret,
    chunk: Chunk,
    tiles: QueryTiles,
    partial: PartialSoftmax,
) -> PartialSoftmax:
    """Partial softmaxes of all tiles of a chunk, in one launch."""
    del partial  # every tile is written
    _, size, dim = chunk.k.shape
    out_dim, rows = chunk.v.shape[-1], cut.rows
    factor = softmax.query_factor(config.scale, None)
    inputs = (
        gather_rows(chunk.q, tiles, cut),
        position_rows(chunk, tiles, cut),
        chunk.k.astype(dtype),
        chunk.v.astype(dtype),
    )
    in_specs = (
        _tile_spec(rows, dim),
        _tile_spec(1, rows),
        _block_spec(size, dim),
        _block_spec(size, out_dim),
    )
    out_specs = _tile_spec(rows, out_dim), _tile_spec(1, rows), _tile_spec(1, rows)
    shapes = (cut.slots, rows, out_dim), (cut.slots, 1, rows), (cut.slots, 1, rows)
    kernel = functools.partial(_forward_kernel, factor=factor, dtype=dtype)
    specs = in_specs, out_specs
    acc, m, l = _launch(
        kernel, "forward", cut, specs, shapes, interpret, _scalar_lists(tiles, cut), inputs
    )
    return PartialSoftmax(acc, m[:, 0], l[:, 0])


def visit_backward(
    cut: ChunkSizes,
    config: SelectedConfig,
    dtype,
    interpret,
    chunk: Chunk,
    residuals: ChunkResiduals,
    tiles: QueryTiles,
    sums,
):
    """Gradients of all tiles of a chunk in one launch; dk and dv are summed."""
    number, size, dim = chunk.k.shape
    out_dim, rows = chunk.v.shape[-1], cut.rows
    factor = softmax.query_factor(config.scale, None)
    in_line = lambda x: gather_rows(x, tiles, cut).reshape(cut.slots, 1, rows)
    inputs = (
        gather_rows(chunk.q, tiles, cut),
        position_rows(chunk, tiles, cut),
        gather_rows(residuals.do, tiles, cut),
        in_line(residuals.lse),
        in_line(residuals.delta),
        chunk.k.astype(dtype),
        chunk.v.astype(dtype),
    )
    line, keys, values = _tile_spec(1, rows), _block_spec(size, dim), _block_spec(size, out_dim)
    in_specs = _tile_spec(rows, dim), line, _tile_spec(rows, out_dim), line, line, keys, values
    out_specs = _tile_spec(rows, dim), keys, values
    shapes = (cut.slots, rows, dim), (number, size, dim), (number, size, out_dim)
    kernel = functools.partial(_backward_kernel, factor=factor, dtype=dtype)
    lists = _scalar_lists(tiles, cut)
    specs = in_specs, out_specs
    dq, dk, dv = _launch(kernel, "backward", cut, specs, shapes, interpret, lists, inputs)
    # A block that no query selected was never written.
    used = jnp.arange(cut.capacity) < tiles.total
    is_written = jnp.zeros(number + 1, bool).at[jnp.where(used, tiles.block, number)].set(True)
    is_written = is_written[:number, None, None]
    _, dk_sum, dv_sum = sums
    return dq, dk_sum + jnp.where(is_written, dk, 0), dv_sum + jnp.where(is_written, dv, 0)
