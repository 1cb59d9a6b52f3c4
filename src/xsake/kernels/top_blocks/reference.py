"""Dense definition of the scores of blocks: truth at small sizes, O(Tq Tk) memory."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from xsake.kernels.block_selection import select_blocks
from xsake.kernels.top_blocks.types import (
    TopBlocksConfig,
    TopBlocksInputs,
    finite_scores,
    pool_keys,
)


def forward(
    inputs: TopBlocksInputs, config: TopBlocksConfig, platform: str
) -> Int[Array, "B Tq Hg Ns"]:
    """See `top_blocks`."""
    batch, queries, heads, dim = inputs.q.shape
    groups, number = config.groups, config.selection.number
    keys, (position, start) = pool_keys(inputs, config), inputs.bounds
    q = inputs.q.astype(inputs.dtype).reshape(batch, queries, groups, heads // groups, dim)
    k = jnp.broadcast_to(keys.k, (*keys.k.shape[:2], groups, dim))
    s = jnp.einsum("btgnd,bsgd->btgns", q, k, precision="highest")
    s = jnp.maximum(s, 0) if config.has_relu else s
    if inputs.weights is not None:
        s = s * inputs.weights.astype(s.dtype).reshape(*q.shape[:4], 1)
    s = s.sum(3)
    seen = keys.visible(0, position, start)
    s = jnp.where(seen[:, :, None], finite_scores(s), -jnp.inf)
    s = s.reshape(batch, queries, groups, number, -1).max(-1)
    position, start = (jnp.broadcast_to(x[..., None], s.shape[:3]) for x in (position, start))
    return select_blocks(s, position, start, config.selection)
