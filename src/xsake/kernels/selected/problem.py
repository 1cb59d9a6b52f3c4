"""What one call of selected attention asks for: numbers known while tracing, and arrays."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.kernels.arguments import sum_dtype


@dataclasses.dataclass(frozen=True)
class Problem:
    """The numbers of a call: hashable, so that `jit` can key on them.

    Args:
        block: keys per block; block j holds the keys from `j * block` on.
        scale: factor on q.k.
    """

    block: int
    scale: float


class Operands(NamedTuple):
    """The arrays of a call.

    A query sees the keys of its blocks up to its own position. The blocks of one query are
    distinct and within the keys; a negative number is a slot that is not used.
    """

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk Dv"]
    blocks: Int[Array, "B Tq Hk Ns"]
    q_positions: Int[Array, "Bp Tq"] | None = None  # None: query i is at position i

    @property
    def dtype(self):
        """Statistics and sums are float32 at least, float64 for float64 inputs."""
        return sum_dtype(self.q.dtype)

    @property
    def positions(self) -> Int[Array, "Bp Tq"]:
        """Where every query is, at most at the last key."""
        if self.q_positions is None:
            return jnp.arange(self.q.shape[1], dtype=jnp.int32)[None]
        return jnp.minimum(self.q_positions, self.k.shape[1] - 1)


class Cotangents(NamedTuple):
    """What the loss wants of the operation's results."""

    out: Float[Array, "B Tq Hq Dv"]
    lse: Float[Array, "B Tq Hq"]


class Gradients(NamedTuple):
    """What the operation gives back."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk Dv"]
