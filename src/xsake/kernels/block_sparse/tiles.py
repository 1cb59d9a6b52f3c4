"""The maths of one tile, shared by every blockwise backend; knows no layout and no loop.

Logits are kept in a unit: in bits (multiplied by log2 e) where 2^x is cheaper than e^x, in nats
where a device has a unit for e^x. A tile of logits is [rows, queries, keys] when a pass walks query
blocks, [rows, keys, queries] when it walks kv blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

LOG2_E = 1.4426950408889634

# 2^f = sum of c_i f^i on [-1/2, 1/2]: relative error 4e-9, and 2^0 is exactly 1.
_POWERS = (
    1.0,
    0.6931472056,
    0.2402264846,
    0.05550329035,
    0.009618373251,
    0.001339984829,
    0.0001537070482,
)
_ROUND = np.float32(1.5 * 2**23 + 127)


def exp2(x):
    """2^x for x <= 127, exactly 0 from x = -127 down; NaN stays NaN.

    Relative error 8e-8 for x in [-126, 0], where XLA:CPU's own float32 exp2 reaches 4e-6; and it
    is a handful of multiply-adds, which fuse.
    """
    if x.dtype != jnp.float32:
        return jnp.exp2(x)
    x = jnp.maximum(x, np.float32(-127))
    shifted = x + _ROUND  # the nearest integer plus 127 now sits in the low bits
    fraction = x - (shifted - _ROUND)
    power = jnp.full_like(x, _POWERS[-1])
    for coefficient in _POWERS[-2::-1]:
        power = power * fraction + np.float32(coefficient)
    exponent = lax.bitcast_convert_type(shifted, jnp.int32) << 23
    return power * lax.bitcast_convert_type(exponent, jnp.float32)


class Unit(NamedTuple):
    """What logits are measured in: how many of it are a nat, and the power that belongs to it."""

    per_nat: float
    power: Callable


BITS = Unit(LOG2_E, exp2)
NATS = Unit(1.0, jnp.exp)


def query_factor(scale: float, softcap: float | None, unit: Unit = BITS) -> float:
    """What queries are multiplied with once, so that `logits` has less to do per pair."""
    return scale * unit.per_nat if softcap is None else scale


def logits(products, bias, softcap: float | None, unit: Unit = BITS):
    """Logits in `unit` from `query_factor * q.k`, and an additive bias or None."""
    if softcap is None:
        return products if bias is None else products + bias * unit.per_nat
    products = products if bias is None else products + bias
    return jnp.tanh(products / softcap) * (softcap * unit.per_nat)


def softcap_slope(tile, softcap: float | None, exists=None, unit: Unit = BITS):
    """Derivative of the capped logits by the plain ones, from the capped ones in `unit`.

    `exists` [rows, 1] leaves out whole rows of a tile, whatever their logits are.
    """
    if softcap is None:
        return None
    slope = 1 - (tile / (softcap * unit.per_nat)) ** 2
    return slope if exists is None else jnp.where(exists[..., None], slope, 0)


class OnlineSoftmax(NamedTuple):
    """A softmax under way: sums relative to the highest logit seen so far."""

    accumulator: jnp.ndarray  # [rows, queries, Dv]
    peak: jnp.ndarray  # [rows, queries], in bits
    mass: jnp.ndarray  # [rows, queries]


def empty_softmax(rows: int, queries: int, dim: int, dtype) -> OnlineSoftmax:
    """Nothing seen yet."""
    return OnlineSoftmax(
        jnp.zeros((rows, queries, dim), dtype),
        jnp.full((rows, queries), -jnp.inf, dtype),
        jnp.zeros((rows, queries), dtype),
    )


def accumulate(state: OnlineSoftmax, tile, v, exists=None) -> OnlineSoftmax:
    """Add a tile of logits [rows, queries, keys] and its values [rows, keys, Dv].

    `exists` [rows, 1] leaves out whole rows of a tile, whatever their logits are.
    """
    highest = tile.max(-1)
    if exists is not None:
        highest = jnp.where(exists, highest, -jnp.inf)
    peak, origin, decay = raised(state.peak, highest)
    weight = weights(tile, origin[..., None], exists)
    mass = state.mass * decay + weight.sum(-1)
    accumulator = state.accumulator * decay[..., None] + matmul(weight, v)
    return OnlineSoftmax(accumulator, peak, mass)


def raised(peak, highest, unit: Unit = BITS):
    """`(peak, origin of exponents, decay of earlier sums)` after logits up to `highest`."""
    new = jnp.maximum(peak, highest)
    origin = jnp.where(new == -jnp.inf, 0, new)
    return new, origin, unit.power(peak - origin)


def settle(state: OnlineSoftmax):
    """`(out, lse)`: zeros and -inf for queries that saw nothing; lse in nats."""
    out = normalised(state.accumulator, state.mass[..., None])
    return out, log_sum_exp(state.peak, state.mass)


def normalised(accumulator, mass):
    """Sums divided by their mass; zeros where there is none."""
    return accumulator / jnp.where(mass != 0, mass, 1)


def log_sum_exp(peak, mass, unit: Unit = BITS):
    """In nats, from a peak in `unit`; -inf for queries that saw nothing."""
    seen = mass != 0
    return jnp.where(seen, peak / unit.per_nat + jnp.log(jnp.where(seen, mass, 1)), -jnp.inf)


def lse_in_unit(lse, unit: Unit = BITS):
    """What `weights` subtracts: +inf for queries that saw nothing, so that their weights are 0."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * unit.per_nat)


def weights(tile, origin, exists=None, unit: Unit = BITS):
    """Power of `tile - origin`, zero in rows that have no item; with the log-sum-exp: softmax."""
    exponent = tile - origin
    if exists is not None:
        exponent = jnp.where(exists[..., None], exponent, -jnp.inf)
    return unit.power(exponent)


def logit_gradient(weight, d_weight, delta, slope):
    """Gradient by `scale * q.k + bias`: `w * (dw - delta)`, times the softcap's slope."""
    gradient = weight * (d_weight - delta)
    return gradient if slope is None else gradient * slope


def matmul(a, b):
    """[rows, m, n] x [rows, n, d], no operand transposed: the form XLA:CPU runs fastest."""
    return jnp.einsum("rmn,rnd->rmd", a, b, precision="highest")


def products(a, b):
    """[rows, m, d] x [rows, n, d]: every dot product of two lists of vectors."""
    return jnp.einsum("rmd,rnd->rmn", a, b, precision="highest")
