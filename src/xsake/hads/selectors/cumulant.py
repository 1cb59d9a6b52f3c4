"""Second-order estimate of block masses from mean and variance of short runs of keys."""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from xsake.hads.selectors.base import ScoringContext, Selector, group_heads, split_blocks


@dataclasses.dataclass(frozen=True)
class Cumulant(Selector):
    """`log run + q.mean + q^2.variance / 2` for each run of keys, with every `stride`-th query.

    The first two terms are a lower bound of the run's log-sum-exp (Jensen); the third is the next
    term of the cumulant expansion.

    Args:
        run: keys per mean and variance; at most the block.
        stride: of the sampled queries.
    """

    run: int = 16
    stride: int = 4
    name: ClassVar[str] = "cumulant"

    def masses(self, q, k, context: ScoringContext, components=None):
        """See `Selector.masses`."""
        run, stride = min(self.run, context.block), min(self.stride, context.block)
        keys = context.split_keys(k).astype(jnp.float32)
        n = keys.shape[1]
        runs = keys.reshape(k.shape[0], -1, run, *k.shape[2:])
        moments = jnp.concatenate([runs.mean(2), runs.var(2)], -1)
        sampled = split_blocks(q, context.block)[:, :, stride // 2 :: stride].astype(jnp.float32)
        sampled = group_heads(context.scale * sampled, k.shape[2])
        powers = jnp.concatenate([sampled, sampled**2 / 2], -1)
        visible = jnp.asarray(context.visible(powers.shape[1], n))

        def row(i):
            scores = jnp.einsum("bshgd,bjhd->bhgsj", powers[:, i], moments) + math.log(run)
            scores = jax.nn.logsumexp(scores.reshape(*scores.shape[:4], n, -1), axis=-1)
            is_visible = visible[:, i, None, None, None]
            return jax.nn.softmax(scores, axis=-1, where=is_visible).mean(3)

        masses = jax.lax.map(row, np.arange(powers.shape[1]))
        return jnp.moveaxis(masses, 0, 3).reshape(q.shape[0], q.shape[2], -1, n)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the cost: two products per sampled query and run; attention has two per pair."""
        return 1 / (min(self.run, block) * min(self.stride, block))
