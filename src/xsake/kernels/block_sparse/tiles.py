"""The maths of one tile, shared by every blockwise backend; knows no layout and no loop.

Logits are kept in bits (multiplied by log2 e), because 2^x is cheaper than e^x. A tile of logits
is [rows, queries, keys] when a pass walks query blocks, [rows, keys, queries] when it walks kv
blocks.
"""

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


def query_factor(scale: float, softcap: float | None) -> float:
    """What queries are multiplied with once, so that `bits` has less to do per pair."""
    return scale * LOG2_E if softcap is None else scale


def bits(products, bias, softcap: float | None):
    """Logits in bits from `query_factor * q.k`, and an additive bias or None."""
    if softcap is None:
        return products if bias is None else products + bias * LOG2_E
    products = products if bias is None else products + bias
    return jnp.tanh(products / softcap) * (softcap * LOG2_E)


def softcap_slope(tile, softcap: float | None):
    """Derivative of the capped logits by the plain ones, from the capped ones in bits."""
    if softcap is None:
        return None
    return 1 - (tile / (softcap * LOG2_E)) ** 2


class OnlineSoftmax(NamedTuple):
    """A softmax under way: sums relative to the highest logit seen so far."""

    accumulator: jnp.ndarray  # [rows, queries, Dv]
    peak: jnp.ndarray  # [rows, queries], bits
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
    peak = jnp.maximum(state.peak, highest)
    origin = jnp.where(peak == -jnp.inf, 0, peak)
    decay = exp2(state.peak - origin)
    weight = weights(tile, origin[..., None], exists)
    mass = state.mass * decay + weight.sum(-1)
    accumulator = state.accumulator * decay[..., None] + matmul(weight, v)
    return OnlineSoftmax(accumulator, peak, mass)


def settle(state: OnlineSoftmax):
    """`(out, lse)`: zeros and -inf for queries that saw nothing; lse in nats."""
    seen = state.mass != 0
    mass = jnp.where(seen, state.mass, 1)
    out = state.accumulator / mass[..., None]
    return out, jnp.where(seen, state.peak / LOG2_E + jnp.log(mass), -jnp.inf)


def lse_in_bits(lse):
    """What `weights` subtracts: +inf for queries that saw nothing, so that their weights are 0."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)


def weights(tile, origin, exists=None):
    """`2^(tile - origin)`, zero in rows that have no item; with the log-sum-exp: the softmax."""
    exponent = tile - origin
    if exists is not None:
        exponent = jnp.where(exists[..., None], exponent, -jnp.inf)
    return exp2(exponent)


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
