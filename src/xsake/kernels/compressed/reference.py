"""Dense definition of compressed attention: truth at small sizes, O(Tq Nc) memory."""

import jax.numpy as jnp
from jax import Array

from xsake.kernels import reference_attention
from xsake.kernels.block_selection import select_blocks
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.compressed import summaries
from xsake.kernels.compressed.types import CompressedConfig, CompressedInputs


def forward(
    inputs: CompressedInputs, config: CompressedConfig, platform: str
) -> tuple[Array, Array, Array | None]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq], blocks [B, Tq, Hk, Ns] or None)`."""
    mask = visible(inputs, config)
    o, lse, p = reference_attention.forward(*inputs[:3], mask, config.scale)
    if config.selection is None:
        return o, lse, None
    batch, queries, q_heads, _ = inputs.q.shape
    heads = inputs.k.shape[2]
    shared = p.reshape(batch, heads, q_heads // heads, queries, -1).sum(2)
    scores = summaries.block_scores(shared, config, config.selection.number)
    position, start = (jnp.broadcast_to(x[:, None], (batch, heads, queries)) for x in inputs.bounds)
    blocks = select_blocks(scores, position, start, config.selection)
    return o, lse, jnp.moveaxis(blocks, 1, 2)


def backward(
    inputs: CompressedInputs, config: CompressedConfig, platform: str, *residuals: Array
) -> Gradients:
    """Gradients from (o, lse, do, dlse) by the formulas, over all pairs."""
    mask = visible(inputs, config)
    return reference_attention.backward(*inputs[:3], mask, residuals, config.scale)


def visible(inputs: CompressedInputs, config: CompressedConfig) -> Array:
    """bool [B, Hk, Tq, Nc]: the summaries that each query sees."""
    batch, number, heads, _ = inputs.k.shape
    position, start = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in inputs.bounds)
    seen = summaries.visible(position, start, number, config)
    return jnp.broadcast_to(seen[:, None], (batch, heads, *seen.shape[1:]))
