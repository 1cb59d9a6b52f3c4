"""Exact block masses of a few queries of each row, read through the components that matter most."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.hads.selectors.selector import Look, grouped
from xsake.kernels.statistics import block_statistics


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Block masses of `queries` evenly spaced queries per row, from `dims` components of q and k.

    Their softmax runs over every key, so a single key that many queries look at is seen, which
    block means and moments wash out.

    Args:
        queries: sampled per row.
        dims: components of queries and keys that are multiplied; at most the head dimension.
    """

    queries: int = 2
    dims: int = 32
    name: str = dataclasses.field(default="sampled", init=False)

    def masses(
        self,
        q: Float[Array, "B T Hq D"],
        k: Float[Array, "B T Hk D"],
        look: Look,
        dims: Int[Array | np.ndarray, "Hk R"] | None = None,
    ) -> Float[Array, "B Hq Nq Nk"]:
        """See `Selector.masses`; without `dims` every component is read."""
        tokens, kv_heads = k.shape[1:3]
        rows = -(-tokens // look.block)
        queries = min(self.queries, look.block)
        inside = (2 * np.arange(queries) + 1) * look.block // (2 * queries)
        position = np.minimum(np.arange(rows)[:, None] * look.block + inside, tokens - 1).ravel()
        q = grouped(q[:, position], kv_heads)
        if dims is not None:
            picked = jnp.asarray(dims)
            q = jnp.take_along_axis(q, picked[None, None, :, None], axis=-1)
            k = jnp.take_along_axis(k, picked[None, None], axis=-1)
        ids = look.segment_ids
        found = block_statistics(
            q.reshape(*q.shape[:2], -1, q.shape[-1]),
            k,
            block_kv=look.block,
            mask=look.mask,
            scale=look.scale,
            softcap=look.softcap,
            q_positions=position.astype(np.int32),
            q_segment_ids=None if ids is None else ids[:, position],
            kv_segment_ids=ids,
        ).mass()
        by_row = found.reshape(found.shape[0], rows, queries, *found.shape[2:])
        return jnp.moveaxis(by_row.mean(2), 1, 2)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """`queries / block` of the queries, `dims / head_dim` of half the work of a pair."""
        share = min(self.dims, head_dim) / (2 * head_dim)
        return min(self.queries, block) / block * share
