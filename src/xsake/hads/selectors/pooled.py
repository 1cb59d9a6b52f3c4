"""Softmax over blocks of (mean query of the row) . (mean key of the block): almost free, blunt."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from xsake.hads.selectors.selector import Look, by_block, causal_softmax, grouped


@dataclasses.dataclass(frozen=True)
class Pooled:
    """Means of queries against means of keys."""

    name: str = dataclasses.field(default="pooled", init=False)

    def masses(
        self, q: Float[Array, "B T Hq D"], k: Float[Array, "B T Hk D"], look: Look, dims=None
    ) -> Float[Array, "B Hq Nq Nk"]:
        """See `Selector.masses`."""
        rows = grouped(by_block(q, look.block).mean(2), k.shape[2])
        means = by_block(k, look.block).mean(2)
        scores = look.scale * jnp.einsum("bihgd,bjhd->bhgij", rows, means)
        return causal_softmax(scores.reshape(q.shape[0], q.shape[2], *scores.shape[-2:]))

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """One product per block where attention has two per pair of tokens."""
        return 1 / (2 * block**2)
