"""Selected attention for NVIDIA GPUs by the kernels of block-sparse attention.

A tile of queries and the block that they selected are a row with one item: forward and dq compute a
row each, dkv all tiles of a block in order.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake.kernels import online_softmax as softmax
from xsake.kernels.block_sparse.mosaic_gpu import ampere, kernels
from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, Gradients
from xsake.kernels.lowering import capability_of
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
from xsake.layout import BlockLayout
from xsake.masks import Causal

TUNING = SelectedTuning(rows=256, tiles=1, queries=4096)
LAUNCHES = {"selected_forward": 1, "selected_backward": 2}  # of a chunk


def unsupported_reason(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call on an NVIDIA GPU; None if it can."""
    dtype, features = inputs.q.dtype, max(inputs.q.shape[-1], inputs.v.shape[-1])
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"its tensor cores take bfloat16 and float16, not {dtype}"
    if features > kernels.MAX_FEATURES:
        return f"its registers hold heads of at most {kernels.MAX_FEATURES} features"
    return ampere.capability_reason(capability_of(platform) or gpu.capability())


def forward(inputs: SelectedInputs, config: SelectedConfig, platform: str, interpret: Any = None):
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
    interpret: Any = None,
) -> Gradients:
    """Gradients for q, k and v, with probabilities recomputed twice."""
    cut = chunk_sizes(inputs, config, TUNING)
    visit = functools.partial(visit_backward, cut, config, inputs.q.dtype, interpret)
    return chunking.backward(inputs, config, cut, visit, (o, lse), (do, dlse))


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
    launch = ampere.launch_of("forward", _tile_inputs(cut, dtype, chunk, tiles), interpret)
    o, lse = kernels.forward_pass(launch, BlockSparseConfig(config.scale), jnp.float32)
    o, lse = o.reshape(cut.slots, cut.rows, -1), lse.reshape(cut.slots, cut.rows)
    # A finished softmax is a partial one with m = lse and l = 1.
    return PartialSoftmax(o, lse * softmax.LOG2E, (lse != -jnp.inf).astype(jnp.float32))


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
    """Gradients of all tiles of a chunk in two launches; dk and dv are summed."""
    inputs = _tile_inputs(cut, dtype, chunk, tiles)
    to_tokens = lambda x: gather_rows(x, tiles, cut).reshape(1, cut.slots * cut.rows, 1, -1)
    do = to_tokens(residuals.do).astype(dtype)
    lse, delta = to_tokens(residuals.lse)[..., 0], to_tokens(residuals.delta)[..., 0]
    lse = jnp.where(jnp.isfinite(do).all(-1), lse, jnp.nan)
    rows = softmax.zero_nonfinite(do), lse, delta
    # The sums of all chunks are scaled once.
    options = {"dtype": jnp.float32, "grad_scale": 1.0}
    of_scale = BlockSparseConfig(config.scale)
    launch = ampere.launch_of("dq", inputs, interpret)
    dq = kernels.dq_given_delta(launch, of_scale, *rows, **options)
    launch = ampere.launch_of("dkv", inputs, interpret)
    dk, dv = kernels.dkv_given_delta(launch, of_scale, *rows, **options)
    _, dk_sum, dv_sum = sums
    dq = dq.reshape(cut.slots, cut.rows, -1)
    return dq, dk_sum + dk.reshape(dk_sum.shape), dv_sum + dv.reshape(dv_sum.shape)


def _tile_inputs(cut: ChunkSizes, dtype, chunk: Chunk, tiles: QueryTiles) -> BlockSparseInputs:
    """A chunk as a block-sparse call: one head, its tiles as query blocks."""
    number, size, _ = chunk.k.shape
    last = jnp.maximum(tiles.total - 1, 0)
    used = jnp.minimum(jnp.arange(cut.slots, dtype=jnp.int32), last)
    layout = BlockLayout(
        jnp.minimum(jnp.arange(cut.slots + 1, dtype=jnp.int32), tiles.total.astype(jnp.int32)),
        tiles.block[used],
        jnp.ones(cut.slots, bool),
        q_tokens=cut.slots * cut.rows,
        kv_tokens=number * size,
        block_q=cut.rows,
        block_kv=size,
        mask=Causal(),
    )
    to_tokens = lambda x: x.astype(dtype).reshape(1, -1, 1, x.shape[-1])
    return BlockSparseInputs(
        to_tokens(gather_rows(chunk.q, tiles, cut)),
        to_tokens(chunk.k),
        to_tokens(chunk.v),
        layout,
        q_positions=position_rows(chunk, tiles, cut).reshape(1, -1),
    )
