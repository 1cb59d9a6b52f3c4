"""What one block-sparse call asks for: numbers known while tracing, and arrays."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from xsake.kernels.arguments import sum_dtype
from xsake.layout import BlockLayout


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """How much a backend computes at once; it never changes a result beyond rounding.

    Args:
        rows: rows (batch, head, query block) computed side by side.
        blocks: listed blocks that a row takes in one step.
    """

    rows: int
    blocks: int


@dataclasses.dataclass(frozen=True)
class Problem:
    """The numbers of a call: hashable, so that `jit` can key on them.

    Args:
        scale: factor on q.k.
        softcap: logits become `softcap * tanh(logits / softcap)`; None leaves them.
        tiles: tile sizes to use instead of the backend's own choice.
    """

    scale: float
    softcap: float | None = None
    tiles: TileSizes | None = None


class Operands(NamedTuple):
    """The arrays of a call. Positions default to the token index, segments to one for all."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk Dv"]
    layout: BlockLayout
    bias: Float[Array, "Bb Hb Tq Tk"] | None = None
    q_positions: Int[Array, "Bp Tq"] | None = None
    kv_positions: Int[Array, "Bp Tk"] | None = None
    q_segment_ids: Int[Array, "B Tq"] | None = None
    kv_segment_ids: Int[Array, "B Tk"] | None = None


class Cotangents(NamedTuple):
    """What the loss wants of the operation's results."""

    out: Float[Array, "B Tq Hq Dv"]
    lse: Float[Array, "B Tq Hq"]


class Gradients(NamedTuple):
    """What the operation gives back; `bias` is None when there was none."""

    q: Float[Array, "B Tq Hq D"]
    k: Float[Array, "B Tk Hk D"]
    v: Float[Array, "B Tk Hk Dv"]
    bias: Float[Array, "Bb Hb Tq Tk"] | None


def compute_dtype(operands: Operands):
    """Statistics and sums are float32 at least, float64 for float64 inputs."""
    return sum_dtype(operands.q.dtype)


def quarantine(k, v):
    """Keep values that are not finite away from queries that may not see them.

    A zero weight times NaN is NaN, so a bad value would reach every query of its block. Instead bad
    values become zero, and their keys become NaN: whoever may see the key gets NaN (the whole row,
    not one column), whoever may not sees nothing.
    """
    finite = jnp.isfinite(v)
    poisoned = jnp.where(finite.all(-1, keepdims=True), k, jnp.nan)
    return poisoned, jnp.where(finite, v, 0)


def cleaned(x):
    """`x` with zeros for what is not finite: for products with weights that are zero there."""
    return jnp.where(jnp.isfinite(x), x, 0)
