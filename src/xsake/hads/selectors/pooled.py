"""Pooled selector: softmax over blocks of (mean query of the row) . (mean key of the block)."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from xsake.hads.selectors.base import ScoringContext, Selector, group_heads, split_blocks


@dataclasses.dataclass(frozen=True)
class Pooled(Selector):
    """Mean queries times mean keys; nearly free, inaccurate."""

    name: ClassVar[str] = "pooled"

    def masses(self, q, k, context: ScoringContext, components=None):
        """See `Selector.masses`."""
        rows = group_heads(split_blocks(q, context.block).mean(2), k.shape[2])
        means = context.split_keys(k).mean(2)
        scores = context.scale * jnp.einsum("bihgd,bjhd->bhgij", rows, means)
        scores = scores.reshape(q.shape[0], q.shape[2], rows.shape[1], -1).astype(jnp.float32)
        visible = context.visible(*scores.shape[2:])
        return jax.nn.softmax(scores, axis=-1, where=visible[:, None])

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the cost: one product per block; attention has two per pair of tokens."""
        return 1 / (2 * block**2)
