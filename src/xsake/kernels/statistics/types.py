"""Inputs, numbers and results of attention statistics."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from xsake.kernels.validation import sum_dtype
from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True)
class StatisticsConfig:
    """Numbers of a call: hashable, part of the key of a compiled program."""

    mask: AbstractMask  # who may see whom, by position
    block_kv: int  # keys per block; at most as many as there are
    scale: float  # factor on q.k
    softcap: float | None = None  # scores become `softcap * tanh(scores / softcap)`; None: no cap


class StatisticsInputs(NamedTuple):
    """The arrays of a call. Positions default to the token index, segments to one for all."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    q_positions: Int[Array, "Bp Tq"] | None = None
    kv_positions: Int[Array, "Bp Tk"] | None = None
    q_segment_ids: Int[Array, "B Tq"] | None = None
    kv_segment_ids: Int[Array, "B Tk"] | None = None

    @property
    def dtype(self):
        """Statistics are float32 at least, float64 for float64 inputs."""
        return sum_dtype(self.q.dtype)


class Statistics(NamedTuple):
    """Where the attention of each query goes, in nats.

    Attributes:
        lse: log of the softmax denominator; -inf for a query that sees nothing.
        entropy: of the query's probabilities, `lse - E_p[s]`; never negative, 0 for an empty query.
        block_lse: log of each kv block's share of the denominator; -inf where nothing is visible.
    """

    lse: Float[Array, "B Tq Hq"]
    entropy: Float[Array, "B Tq Hq"]
    block_lse: Float[Array, "B Tq Hq Nk"]

    def mass(self) -> Float[Array, "B Tq Hq Nk"]:
        """The weight that each query gives to each kv block; sums to 1, to 0 for an empty query."""
        lse = jnp.where(self.lse == -jnp.inf, 0, self.lse)
        return jnp.exp(self.block_lse - lse[..., None])
