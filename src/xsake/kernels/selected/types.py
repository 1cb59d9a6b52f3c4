"""Inputs and numbers of a selected-attention call."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.kernels.validation import sum_dtype


@dataclasses.dataclass(frozen=True)
class SelectedConfig:
    """Numbers of a call: hashable, part of the key of a compiled program."""

    block: int  # keys per block; block j holds the keys from `j * block` on
    scale: float  # factor on q.k


class SelectedInputs(NamedTuple):
    """Arrays of a call.

    A query sees the keys of its blocks up to its own position. The blocks of one query are
    distinct and within the keys; a negative number is an unused slot.
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
        """Position of every query, at most that of the last key."""
        if self.q_positions is None:
            return jnp.arange(self.q.shape[1], dtype=jnp.int32)[None]
        return jnp.minimum(self.q_positions, self.k.shape[1] - 1)
