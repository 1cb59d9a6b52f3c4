"""What one call of pooled attention asks for: numbers known while tracing, and arrays."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.kernels.arguments import sum_dtype


@dataclasses.dataclass(frozen=True)
class Choosing:
    """How blocks are chosen from what queries see of the summaries.

    Args:
        block: keys per block.
        number: blocks that there are.
        slots: most blocks of a query.
        first: blocks at the start of a sequence that are always chosen.
        local: blocks that end with the query's own one and are always chosen.
    """

    block: int
    number: int
    slots: int
    first: int = 1
    local: int = 2


@dataclasses.dataclass(frozen=True)
class Problem:
    """The numbers of a call: hashable, so that `jit` can key on them.

    Args:
        length: keys that a summary is made of.
        stride: keys between the beginnings of two summaries.
        scale: factor on q.k.
        choosing: how blocks are chosen; None chooses none.
    """

    length: int
    stride: int
    scale: float
    choosing: Choosing | None = None


class Operands(NamedTuple):
    """The arrays of a call: summary i stands for keys `i * stride` to `i * stride + length - 1`.

    A query sees the summaries whose keys all lie between the start of its sequence and itself.
    """

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Nc Hk D"]
    v: Float[Array, "B Nc Hk Dv"]
    q_positions: Int[Array, "Bp Tq"] | None = None  # None: query i is at position i
    starts: Int[Array, "Bp Tq"] | None = None  # where each query's sequence begins; None: at 0

    @property
    def dtype(self):
        """Statistics and sums are float32 at least, float64 for float64 inputs."""
        return sum_dtype(self.q.dtype)

    @property
    def places(self) -> tuple[Int[Array, "Bp Tq"], Int[Array, "Bp Tq"]]:
        """Position of every query, and where its sequence begins."""
        at = self.q_positions
        at = jnp.arange(self.q.shape[1], dtype=jnp.int32)[None] if at is None else at
        starts = jnp.zeros_like(at) if self.starts is None else self.starts
        rows = max(at.shape[0], starts.shape[0]), at.shape[1]
        return jnp.broadcast_to(at, rows), jnp.broadcast_to(starts, rows)


class Cotangents(NamedTuple):
    """What the loss wants of the operation's results."""

    out: Float[Array, "B Tq Hq Dv"]
    lse: Float[Array, "B Tq Hq"]


class Gradients(NamedTuple):
    """What the operation gives back."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Nc Hk D"]
    v: Float[Array, "B Nc Hk Dv"]
