"""Sampled selector: block masses of a few queries per row from the most important components."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from xsake.hads.selectors.base import ScoringContext, Selector, group_heads
from xsake.kernels.statistics import block_statistics
from xsake.layout.grid import count_blocks


@dataclasses.dataclass(frozen=True)
class Sampled(Selector):
    """Block masses of `queries` evenly spaced queries per row, from `dims` components of q and k.

    The softmax covers every key, so single important keys count, which block means and moments
    average out.

    Args:
        queries: sampled per row.
        dims: components of queries and keys in a score; at most the head dimension.
    """

    queries: int = 2
    dims: int = 32
    name: ClassVar[str] = "sampled"

    def masses(self, q, k, context: ScoringContext, components=None):
        """See `Selector.masses`."""
        tokens, (kv_heads, dim) = q.shape[1], k.shape[2:]
        rows, queries = count_blocks(tokens, context.block), min(self.queries, context.block)
        inside = (2 * np.arange(queries) + 1) * context.block // (2 * queries)
        sampled = np.minimum(np.arange(rows)[:, None] * context.block + inside, tokens - 1).ravel()
        position, q = sampled.astype(np.int32), group_heads(q[:, sampled], kv_heads)
        if context.chunk is not None:
            first = context.chunk.first_row[:, None] * context.block
            position = jnp.clip(first + position[None], 0, context.chunk.num_tokens[:, None] - 1)
        if components is not None and self.dims < dim:
            kept = jnp.asarray(components)[:, : self.dims]
            q = jnp.take_along_axis(q, kept[None, None, :, None], axis=-1)
            k = jnp.take_along_axis(k, kept[None, None], axis=-1)
        ids = context.segment_ids
        masses = block_statistics(
            q.reshape(*q.shape[:2], -1, q.shape[-1]),
            k,
            block_kv=context.block,
            mask=context.mask,
            scale=context.scale,
            softcap=context.softcap,
            q_positions=position,
            q_segment_ids=None if ids is None else ids[:, sampled],
            kv_segment_ids=ids,
        ).mass()
        by_row = masses.reshape(masses.shape[0], rows, queries, *masses.shape[2:])
        return jnp.moveaxis(by_row.mean(2), 1, 2)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the cost: `queries / block` of the queries, `dims / head_dim` of the scores."""
        share = min(self.dims, head_dim) / (2 * head_dim)
        return min(self.queries, block) / block * share
