"""Inputs and numbers of a compressed-attention call."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.kernels.block_selection import BlockSelection
from xsake.kernels.validation import sum_dtype


@dataclasses.dataclass(frozen=True)
class CompressedConfig:
    """Numbers of a call: hashable, part of the key of a compiled program."""

    length: int  # keys of a summary
    stride: int  # keys between the starts of two summaries
    scale: float  # factor on q.k
    selection: BlockSelection | None = None  # of blocks; None: none


class CompressedInputs(NamedTuple):
    """Arrays of a call: summary i stands for keys `i * stride` to `i * stride + length - 1`.

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
    def bounds(self) -> tuple[Int[Array, "Bp Tq"], Int[Array, "Bp Tq"]]:
        """Position of every query, and where its sequence begins."""
        at = self.q_positions
        at = jnp.arange(self.q.shape[1], dtype=jnp.int32)[None] if at is None else at
        starts = jnp.zeros_like(at) if self.starts is None else self.starts
        rows = max(at.shape[0], starts.shape[0]), at.shape[1]
        return jnp.broadcast_to(at, rows), jnp.broadcast_to(starts, rows)
