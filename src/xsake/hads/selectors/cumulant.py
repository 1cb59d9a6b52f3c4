"""Block masses from the mean and the variance of keys in short runs: a second-order estimate."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from xsake.hads.selectors.selector import Look, by_block, grouped


@dataclasses.dataclass(frozen=True)
class Cumulant:
    """`log run + q.mean + q^2.variance / 2` for each run of keys, with every `stride`-th query.

    The first two terms bound the run's log-sum-exp from below (Jensen); the third is the next term
    of its cumulant expansion.

    Args:
        run: keys whose moments are taken together; at most the block.
        stride: one query in so many is asked.
    """

    run: int = 16
    stride: int = 4
    name: str = dataclasses.field(default="cumulant", init=False)

    def masses(
        self, q: Float[Array, "B T Hq D"], k: Float[Array, "B T Hk D"], look: Look, dims=None
    ) -> Float[Array, "B Hq Nq Nk"]:
        """See `Selector.masses`."""
        run, stride = min(self.run, look.block), min(self.stride, look.block)
        keys = by_block(k, look.block).astype(jnp.float32)
        n = keys.shape[1]
        runs = keys.reshape(k.shape[0], -1, run, *k.shape[2:])
        moments = jnp.concatenate([runs.mean(2), runs.var(2)], -1)
        asked = by_block(q, look.block)[:, :, stride // 2 :: stride].astype(jnp.float32)
        asked = grouped(look.scale * asked, k.shape[2])
        powers = jnp.concatenate([asked, asked**2 / 2], -1)

        def row(i):
            scores = jnp.einsum("bshgd,bjhd->bhgsj", powers[:, i], moments) + math.log(run)
            scores = jax.nn.logsumexp(scores.reshape(*scores.shape[:4], n, -1), axis=-1)
            return jax.nn.softmax(scores, axis=-1, where=np.arange(n) <= i).mean(3)

        found = jax.lax.map(row, np.arange(n))
        return jnp.moveaxis(found, 0, 3).reshape(q.shape[0], q.shape[2], n, n)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Two products per asked query and run, where attention has two per pair of tokens."""
        return 1 / (min(self.run, block) * min(self.stride, block))
