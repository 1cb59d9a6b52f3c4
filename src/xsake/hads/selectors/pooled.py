"""Pooled selector: softmax over blocks of (mean query of the row) . (mean key of the block)."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from xsake.hads.selectors.base import ScoringContext, causal_softmax, group_heads, split_blocks


@dataclasses.dataclass(frozen=True)
class Pooled:
    """Mean queries times mean keys; nearly free, inaccurate."""

    name: str = dataclasses.field(default="pooled", init=False)

    def masses(
        self,
        q: Float[Array, "B T Hq D"],
        k: Float[Array, "B T Hk D"],
        context: ScoringContext,
        dims=None,
    ) -> Float[Array, "B Hq Nq Nk"]:
        """See `Selector.masses`."""
        rows = group_heads(split_blocks(q, context.block).mean(2), k.shape[2])
        means = split_blocks(k, context.block).mean(2)
        scores = context.scale * jnp.einsum("bihgd,bjhd->bhgij", rows, means)
        return causal_softmax(scores.reshape(q.shape[0], q.shape[2], *scores.shape[-2:]))

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the cost: one product per block; attention has two per pair of tokens."""
        return 1 / (2 * block**2)
