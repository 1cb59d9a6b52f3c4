"""Online softmax of a tile, shared by every blockwise kernel: `m`, `l`, `acc`, and its gradient.

Scores `s` are kept in a base: multiplied by log2 e where 2^x is cheaper than e^x, as they are where
a device has an instruction for e^x. A tile of scores is [rows, queries, keys] in passes over query
blocks and [rows, keys, queries] in passes over kv blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

LOG2E = 1.4426950408889634

# 2^f = sum of c_i f^i on [-1/2, 1/2]: relative error 4e-9, and 2^0 is exactly 1.
_EXP2_COEFFICIENTS = (
    1.0,
    0.6931472056,
    0.2402264846,
    0.05550329035,
    0.009618373251,
    0.001339984829,
    0.0001537070482,
)
_ROUND = np.float32(1.5 * 2**23 + 127)
_ROUND_BITS = _ROUND.view(np.int32)


def exp2(x: Array) -> Array:
    """2^x for x <= 127, exactly 0 from x = -127 down; NaN stays NaN.

    Relative error 8e-8 for x in [-126, 0], where XLA:CPU's own float32 exp2 reaches 4e-6; and it
    is a handful of multiply-adds, which fuse.
    """
    if x.dtype != jnp.float32:
        return jnp.exp2(x)
    x = jnp.maximum(x, np.float32(-127))
    bits = lax.bitcast_convert_type(x + _ROUND, jnp.int32)  # low bits: the nearest integer + 127
    # Subtracted as integers: XLA before jax 0.12 simplifies (x + c) - c to x for floats too.
    fraction = x - (bits - _ROUND_BITS).astype(jnp.float32)
    power = jnp.full_like(x, _EXP2_COEFFICIENTS[-1])
    for coefficient in _EXP2_COEFFICIENTS[-2::-1]:
        power = power * fraction + np.float32(coefficient)
    return power * lax.bitcast_convert_type(bits << 23, jnp.float32)


class Base(NamedTuple):
    """Base of the exponentials: the factor on natural scores, and the function."""

    factor: float
    exp: Callable[[Array], Array]


BASE_2 = Base(LOG2E, exp2)
BASE_E = Base(1.0, jnp.exp)


def query_factor(scale: float, softcap: float | None, base: Base = BASE_2) -> float:
    """Factor on the queries that saves `to_scores` work per pair."""
    return scale * base.factor if softcap is None else scale


def to_scores(qk: Array, bias: Array | None, softcap: float | None, base: Base = BASE_2) -> Array:
    """Scores in `base` from `query_factor * q.k` and an additive bias."""
    if softcap is None:
        return qk if bias is None else qk + bias * base.factor
    qk = qk if bias is None else qk + bias
    return jnp.tanh(qk / softcap) * (softcap * base.factor)


def softcap_grad(
    s: Array, softcap: float | None, exists: Array | None = None, base: Base = BASE_2
) -> Array | None:
    """Derivative of capped scores by uncapped ones, from the capped ones.

    `exists` [rows, 1] drops whole rows of a tile, whatever their scores are.
    """
    if softcap is None:
        return None
    slope = 1 - (s / (softcap * base.factor)) ** 2
    return slope if exists is None else jnp.where(exists[..., None], slope, 0)


class SoftmaxState(NamedTuple):
    """Running softmax: sums relative to the running maximum."""

    acc: Array  # [rows, queries, Dv]: sum of p v
    m: Array  # [rows, queries]: running maximum of s
    l: Array  # [rows, queries]: sum of p


def init(rows: int, queries: int, dim: int, dtype: Any) -> SoftmaxState:
    """State before the first tile."""
    return SoftmaxState(
        jnp.zeros((rows, queries, dim), dtype),
        jnp.full((rows, queries), -jnp.inf, dtype),
        jnp.zeros((rows, queries), dtype),
    )


def update(state: SoftmaxState, s: Array, v: Array, exists: Array | None = None) -> SoftmaxState:
    """Add a tile of scores [rows, queries, keys] and its values [rows, keys, Dv].

    `exists` [rows, 1] drops whole rows of a tile, whatever their scores are.
    """
    m_tile = s.max(-1)
    if exists is not None:
        m_tile = jnp.where(exists, m_tile, -jnp.inf)
    m, m_safe, alpha = rescale(state.m, m_tile)
    p = probabilities(s, m_safe[..., None], exists)
    l = state.l * alpha + p.sum(-1)
    acc = state.acc * alpha[..., None] + matmul(p, v)
    return SoftmaxState(acc, m, l)


def rescale(m: Array, m_tile: Array, base: Base = BASE_2) -> tuple[Array, Array, Array]:
    """`(m_new, m_safe, alpha)`: the new maximum, it or 0 if it is -inf, the factor on old sums."""
    m_new = jnp.maximum(m, m_tile)
    m_safe = jnp.where(m_new == -jnp.inf, 0, m_new)
    return m_new, m_safe, base.exp(m - m_safe)


def finalize(state: SoftmaxState) -> tuple[Array, Array]:
    """`(o, lse)`: zeros and -inf for queries without a visible key; lse in nats."""
    return normalize(state.acc, state.l[..., None]), log_sum_exp(state.m, state.l)


def normalize(acc: Array, l: Array) -> Array:
    """`acc / l`; zeros where l is 0."""
    return acc / jnp.where(l != 0, l, 1)


def log_sum_exp(m: Array, l: Array, base: Base = BASE_2) -> Array:
    """Log-sum-exp in nats from a maximum in `base`; -inf where l is 0."""
    is_visible = l != 0
    return jnp.where(is_visible, m / base.factor + jnp.log(jnp.where(is_visible, l, 1)), -jnp.inf)


def lse_to_base(lse: Array, base: Base = BASE_2) -> Array:
    """What `probabilities` subtracts: lse in `base`, +inf where it is -inf so that p is 0."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse * base.factor)


def probabilities(
    s: Array, origin: Array, exists: Array | None = None, base: Base = BASE_2
) -> Array:
    """`exp(s - origin)`, 0 in rows that do not exist; with the log-sum-exp as origin: softmax."""
    exponent = s - origin
    if exists is not None:
        exponent = jnp.where(exists[..., None], exponent, -jnp.inf)
    return base.exp(exponent)


def score_grad(p: Array, dp: Array, delta: Array, slope: Array | None) -> Array:
    """`ds = p (dp - delta)`, times the derivative of the softcap."""
    ds = p * (dp - delta)
    return ds if slope is None else ds * slope


class BackwardRows(NamedTuple):
    """Per-query inputs of the backward passes."""

    do: Any  # finite
    lse: Any  # in base; NaN for a query whose cotangent is not finite: reaches the keys it sees
    delta: Any  # sum(do * o) - dlse


def backward_rows(
    dtype: Any, o: Array, lse: Array, do: Array, dlse: Array, *, base: Base = BASE_2
) -> BackwardRows:
    """Per-query inputs of the backward passes from the residuals."""
    lse = jnp.where(jnp.isfinite(do).all(-1), lse_to_base(lse, base), jnp.nan)
    do = zero_nonfinite(do)
    delta = (do.astype(dtype) * o.astype(dtype)).sum(-1) - dlse.astype(dtype)
    return BackwardRows(do, lse, delta)


def merge(o: Array, lse: Array, other_o: Array, other_lse: Array) -> tuple[Array, Array]:
    """Merge two results over different keys; differentiable, also where neither saw a key."""
    top = jnp.maximum(lse, other_lse)
    top = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    l, other_l = jnp.exp(lse - top), jnp.exp(other_lse - top)
    total = l + other_l
    is_empty = total == 0
    total = jnp.where(is_empty, 1, total)
    merged = o * (l / total)[..., None] + other_o * (other_l / total)[..., None]
    return merged, jnp.where(is_empty, -jnp.inf, top + jnp.log(total))


def add_sinks(o: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Add sink logits [Hq, S] to the denominator of `(o, lse)`; autodiff gives their gradients."""
    sink = sink_lse(sinks.astype(lse.dtype))[None, None]
    is_empty = lse == -jnp.inf
    safe = jnp.where(is_empty, 0, lse)
    joint = jnp.where(is_empty, sink, jnp.logaddexp(safe, sink))
    share = jnp.where(is_empty, 0, jnp.exp(safe - joint))
    return (o.astype(lse.dtype) * share[..., None]).astype(o.dtype), joint


def sink_lse(sinks: Array) -> Array:
    """Log-sum-exp of each head's sinks [Hq, S]; a sink of -inf is absent and has gradient 0."""
    exists = sinks != -jnp.inf
    m = jnp.where(exists, sinks, -jnp.inf).max(-1)
    m = jax.lax.stop_gradient(jnp.where(jnp.isfinite(m), m, 0))
    p = jnp.where(exists, jnp.exp(jnp.where(exists, sinks, 0) - m[:, None]), 0)
    l, has_sinks = p.sum(-1), exists.any(-1)
    return jnp.where(has_sinks, m + jnp.log(jnp.where(has_sinks, l, 1)), -jnp.inf)


def isolate_nonfinite(k: Array, v: Array) -> tuple[Array, Array]:
    """Keep non-finite values away from queries that may not see them.

    A zero probability times NaN is NaN, so a bad value would reach every query of its block. Bad
    values become zero, and their keys become NaN: a query that may see the key gets NaN in its
    whole row, any other is not affected.
    """
    is_finite = jnp.isfinite(v)
    k = jnp.where(is_finite.all(-1, keepdims=True), k, jnp.nan)
    return k, jnp.where(is_finite, v, 0)


def zero_nonfinite(x: Array) -> Array:
    """Replace non-finite values by zero, for products with probabilities that are zero there."""
    return jnp.where(jnp.isfinite(x), x, 0)


def matmul(a: Array, b: Array) -> Array:
    """[rows, m, n] x [rows, n, d], no operand transposed: the form XLA:CPU runs fastest."""
    return jnp.einsum("rmn,rnd->rmd", a, b, precision="highest")


def dot_products(a: Array, b: Array) -> Array:
    """[rows, m, d] x [rows, n, d] -> [rows, m, n]."""
    return jnp.einsum("rmd,rnd->rmn", a, b, precision="highest")
