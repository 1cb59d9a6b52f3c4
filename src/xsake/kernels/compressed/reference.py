"""Dense definition of compressed attention: truth at small sizes, O(Tq Nc) memory."""

import jax.numpy as jnp
from jax import Array

from xsake.kernels import reference_attention
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.compressed import topk
from xsake.kernels.compressed.types import CompressedConfig, CompressedInputs


def unsupported_reason(
    inputs: CompressedInputs, config: CompressedConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call: it serves every call."""
    return None


def forward(inputs: CompressedInputs, config: CompressedConfig, platform: str):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq], blocks [B, Tq, Hk, Ns] or None)`."""
    seen = visible(inputs, config)
    out, lse, weight = reference_attention.forward(*inputs[:3], seen, config.scale)
    if config.selection is None:
        return out, lse, None
    batch, queries, q_heads, _ = inputs.q.shape
    heads = inputs.k.shape[2]
    shared = weight.reshape(batch, heads, q_heads // heads, queries, -1).sum(2)
    scores = topk.block_scores(shared, config, config.selection.number)
    position, start = (jnp.broadcast_to(x[:, None], (batch, heads, queries)) for x in inputs.bounds)
    blocks = topk.select_blocks(scores, position, start, config.selection)
    return out, lse, jnp.moveaxis(blocks, 1, 2)


def backward(
    inputs: CompressedInputs,
    config: CompressedConfig,
    platform: str,
    o: Array,
    lse: Array,
    do: Array,
    dlse: Array,
) -> Gradients:
    """Gradients by the formulas, over all pairs."""
    seen, arrays = visible(inputs, config), tuple(inputs[:3])
    return Gradients(
        *reference_attention.backward(arrays, seen, config.scale, (o, lse), (do, dlse))
    )


def visible(inputs: CompressedInputs, config: CompressedConfig):
    """bool [B, Hk, Tq, Nc]: the summaries that each query sees."""
    batch, number, heads, _ = inputs.k.shape
    position, start = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in inputs.bounds)
    seen = topk.visible(position, start, number, config)
    return jnp.broadcast_to(seen[:, None], (batch, heads, *seen.shape[1:]))
