"""Selected attention for NVIDIA GPUs by the kernels of block-sparse attention.

A tile of queries and the block that they selected are a row with one item: forward and dq compute a
row each, dkv all tiles of a block in order.
"""

import jax.numpy as jnp

from xsake.kernels import online_softmax as softmax
from xsake.kernels.block_sparse.mosaic_gpu import ampere, kernels
from xsake.kernels.block_sparse.mosaic_gpu import ops as gpu
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.lowering import capability_of
from xsake.kernels.selected import chunking
from xsake.kernels.selected.chunking import (
    ChunkResiduals,
    ChunkTiles,
    PartialSoftmax,
    SelectedTuning,
    TileGradients,
)
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


def visit_forward(call: ChunkTiles, partial: PartialSoftmax) -> PartialSoftmax:
    """Partial softmaxes of all tiles of a chunk, in one launch."""
    del partial  # every tile is written
    launch = ampere.launch_of("forward", _tile_inputs(call), call.interpret)
    o, lse = kernels.forward_pass(launch, BlockSparseConfig(call.config.scale), jnp.float32)
    shape = call.sizes.slots, call.sizes.rows
    o, lse = o.reshape(*shape, -1), lse.reshape(shape)
    # A finished softmax is a partial one with m = lse and l = 1.
    return PartialSoftmax(o, lse * softmax.LOG2E, (lse != -jnp.inf).astype(jnp.float32))


def visit_backward(
    call: ChunkTiles, residuals: ChunkResiduals, sums: TileGradients
) -> TileGradients:
    """Gradients of all tiles of a chunk, in two launches."""
    inputs, shape = _tile_inputs(call), (call.sizes.slots, call.sizes.rows)
    to_tokens = lambda x: call.gather_rows(x).reshape(1, inputs.q.shape[1], 1, -1)
    do = to_tokens(residuals.do).astype(call.dtype)
    lse, delta = to_tokens(residuals.lse)[..., 0], to_tokens(residuals.delta)[..., 0]
    lse = jnp.where(jnp.isfinite(do).all(-1), lse, jnp.nan)
    rows = softmax.BackwardRows(softmax.zero_nonfinite(do), lse, delta)
    config = BlockSparseConfig(call.config.scale)
    launch = ampere.launch_of("dq", inputs, call.interpret)
    dq = kernels.dq_given_rows(launch, config, rows, as_sums=True)
    launch = ampere.launch_of("dkv", inputs, call.interpret)
    dk, dv = kernels.dkv_given_rows(launch, config, rows, as_sums=True)
    dk, dv = dk.reshape(sums.dk.shape), dv.reshape(sums.dv.shape)
    return TileGradients(dq.reshape(*shape, -1), sums.dk + dk, sums.dv + dv)


forward, backward = chunking.define_backend(lambda platform: TUNING, visit_forward, visit_backward)


def _tile_inputs(call: ChunkTiles) -> BlockSparseInputs:
    """A chunk as a block-sparse call: one head, its tiles as query blocks."""
    chunk, (number, size, _) = call.chunk, call.chunk.k.shape
    slots, rows, total = call.sizes.slots, call.sizes.rows, call.tiles.total
    layout = BlockLayout(
        jnp.minimum(jnp.arange(slots + 1, dtype=jnp.int32), total.astype(jnp.int32)),
        call.slot_blocks(),
        jnp.ones(slots, bool),
        q_tokens=slots * rows,
        kv_tokens=number * size,
        block_q=rows,
        block_kv=size,
        mask=Causal(),
    )
    to_tokens = lambda x: x.astype(call.dtype).reshape(1, -1, 1, x.shape[-1])
    return BlockSparseInputs(
        to_tokens(call.gather_rows(chunk.q)),
        to_tokens(chunk.k),
        to_tokens(chunk.v),
        layout,
        q_positions=call.position_rows().reshape(1, -1),
    )
