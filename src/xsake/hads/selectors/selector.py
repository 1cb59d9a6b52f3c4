"""What a selector is: estimates of block masses from queries and keys, at a known price."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.masks import AbstractMask, Causal


class Look(NamedTuple):
    """How the queries of a call see its keys; `Tq == Tk`, and query i is at position i."""

    block: int
    scale: float
    mask: AbstractMask = Causal()
    softcap: float | None = None
    segment_ids: Any = None  # [B, T]


@runtime_checkable
class Selector(Protocol):
    """Scores the blocks of an input at run time."""

    @property
    def name(self) -> str: ...

    def masses(
        self,
        q: Float[Array, "B T Hq D"],
        k: Float[Array, "B T Hk D"],
        look: Look,
        dims: Int[Array | np.ndarray, "Hk R"] | None = None,
    ) -> Float[Array, "B Hq Nq Nk"]:
        """Estimated shares of blocks in the attention of each row, its queries' mean.

        Args:
            q: queries as they enter the scores, rotations included.
            k: keys, likewise.
            look: how they see each other.
            dims: components of queries and keys worth reading, for selectors that read some only.
        """
        ...

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Flops of scoring, as a share of those of dense causal attention."""
        ...


def by_block(x: Float[Array, "B T H D"], block: int) -> Float[Array, "B N b H D"]:
    """Tokens cut into blocks; the last one is filled up with its own last token."""
    short = -x.shape[1] % block
    filled = jnp.pad(x, ((0, 0), (0, short), (0, 0), (0, 0)), mode="edge")
    return filled.reshape(x.shape[0], -1, block, *x.shape[2:])


def grouped(q: Float[Array, "*rest Hq D"], kv_heads: int) -> Float[Array, "*rest Hk G D"]:
    """Query heads beside the kv head that they share."""
    return q.reshape(*q.shape[:-2], kv_heads, -1, q.shape[-1])


def causal_softmax(scores: Float[Array, "*rest Nq Nk"]) -> Float[Array, "*rest Nq Nk"]:
    """Softmax over the blocks that a row sees; hidden ones get 0."""
    seen = np.tri(scores.shape[-1], dtype=bool)
    return jax.nn.softmax(scores.astype(jnp.float32), axis=-1, where=seen)


def mixed(
    masses: Float[Array, "B Hq Nq Nk"], weights: Float[Array | np.ndarray, "Hq 3"]
) -> Float[Array, "B Hq Nq Nk"]:
    """Estimates corrected by what calibration found out about each head.

    A row's mass is predicted as `w0 * its estimate + w1 * the estimate of the row before it
    + w2 / (blocks it sees)`: heads whose attention hardly moves trust the row before, and heads
    that the selector misjudges trust the even share.
    """
    own, before, even = (jnp.asarray(weights)[None, :, i, None, None] for i in range(3))
    n = masses.shape[-1]
    previous = jnp.pad(masses[..., :-1, :], ((0, 0), (0, 0), (1, 0), (0, 0)))
    flat = np.tri(n, dtype=np.float32) / np.arange(1, n + 1, dtype=np.float32)[:, None]
    return own * masses + before * previous + even * flat[None, None]
