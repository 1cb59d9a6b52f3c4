"""Selector protocol: estimates of block masses from queries and keys, and their cost."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.masks import AbstractMask, Causal


class ScoringContext(NamedTuple):
    """Block size, scale and mask of a self-attention call; query i is at position i."""

    block: int
    scale: float
    mask: AbstractMask = Causal()
    softcap: float | None = None
    segment_ids: Any = None  # [B, T]


@runtime_checkable
class Selector(Protocol):
    """Block scorer at run time."""

    @property
    def name(self) -> str: ...

    def masses(
        self,
        q: Float[Array, "B T Hq D"],
        k: Float[Array, "B T Hk D"],
        context: ScoringContext,
        dims: Int[Array | np.ndarray, "Hk R"] | None = None,
    ) -> Float[Array, "B Hq Nq Nk"]:
        """Estimate the attention mass of each block, mean over the queries of a row.

        Args:
            q: queries after rotary embedding.
            k: keys after rotary embedding.
            context: block size, scale and mask.
            dims: components of queries and keys to use; None: all.
        """
        ...

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return flops of scoring / flops of dense causal attention."""
        ...


def split_blocks(x: Float[Array, "B T H D"], block: int) -> Float[Array, "B N b H D"]:
    """Split tokens into blocks; the last one is padded with its last token."""
    missing = -x.shape[1] % block
    padded = jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0)), mode="edge")
    return padded.reshape(x.shape[0], -1, block, *x.shape[2:])


def group_heads(q: Float[Array, "*rest Hq D"], kv_heads: int) -> Float[Array, "*rest Hk G D"]:
    """Split query heads into groups that share a kv head."""
    return q.reshape(*q.shape[:-2], kv_heads, -1, q.shape[-1])


def causal_softmax(scores: Float[Array, "*rest Nq Nk"]) -> Float[Array, "*rest Nq Nk"]:
    """Return the softmax over the visible blocks of each row; masked ones get 0."""
    visible = np.tri(scores.shape[-1], dtype=bool)
    return jax.nn.softmax(scores.astype(jnp.float32), axis=-1, where=visible)


def correct_masses(
    masses: Float[Array, "B Hq Nq Nk"], weights: Float[Array | np.ndarray, "Hq 3"]
) -> Float[Array, "B Hq Nq Nk"]:
    """Correct estimates with the calibrated weights of each head.

    The mass of row i is predicted as `w0 * estimate[i] + w1 * estimate[i - 1] + w2 / visible[i]`.
    `w1` is large for heads whose attention changes slowly, `w2` where the estimate is poor.
    """
    w0, w1, w2 = (jnp.asarray(weights)[None, :, i, None, None] for i in range(3))
    n = masses.shape[-1]
    previous = jnp.pad(masses[..., :-1, :], ((0, 0), (0, 0), (1, 0), (0, 0)))
    uniform = np.tri(n, dtype=np.float32) / np.arange(1, n + 1, dtype=np.float32)[:, None]
    return w0 * masses + w1 * previous + w2 * uniform[None, None]
