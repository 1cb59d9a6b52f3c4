"""The comparator of the error budget: dense attention, forward and backward, in the caller's dtype.

It is what a careful user would write: matrix products whose operands and results have the dtype
of the inputs, and softmax statistics in float32 at least. NumPy and not JAX, because a compiler
may keep intermediate results wider than the dtype says, and would then promise more than the
dtype can hold.
"""

import dataclasses

import ml_dtypes
import numpy as np

from xsake.testing.oracle import Operands, Truth


@dataclasses.dataclass(frozen=True)
class _Rounding:
    """Products in `wide`, results in `narrow`."""

    narrow: np.dtype
    wide: np.dtype

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """`x` as `narrow` can hold it, ready for arithmetic in `wide`."""
        return x.astype(self.narrow).astype(self.wide)


def _probabilities(x: Operands, at: tuple[int, int], rounded: _Rounding):
    """Of head `at = (b, h)`: weights of keys and sinks, both again from lse, lse, cap slope."""
    b, h = at
    g = h // (x.q.shape[2] // x.k.shape[2])
    q, k = (a.astype(rounded.wide) for a in (x.q[b, :, h], x.k[b, :, g]))
    raw = rounded(rounded(q @ k.T) * rounded.wide.type(x.resolved_scale))
    if x.bias is not None:
        raw = rounded(raw + np.broadcast_to(x.bias, x.allowed.shape)[b, h].astype(rounded.wide))
    slope = np.ones_like(raw)
    if x.softcap is not None:
        t = rounded(np.tanh(rounded(raw / rounded.wide.type(x.softcap))))
        raw, slope = rounded(rounded.wide.type(x.softcap) * t), rounded(1 - t * t)
    s = np.where(x.allowed[b, h], raw, rounded.wide.type(-np.inf))
    sinks = np.broadcast_to(
        x.sink_logits(h).astype(rounded.wide), (s.shape[0], x.sink_logits(h).size)
    )
    logits = np.concatenate([s, sinks], axis=1)
    peak = logits.max(axis=1, keepdims=True, initial=-np.inf)
    empty = peak == -np.inf
    weights = np.exp(logits - np.where(empty, rounded.wide.type(0), peak))
    mass = weights.sum(axis=1, keepdims=True)
    p = weights / np.where(empty, rounded.wide.type(1), mass)
    lse = np.where(empty, peak, peak + np.log(np.where(empty, 1, mass)))[:, 0]
    again = np.exp(logits - np.where(empty, rounded.wide.type(0), lse[:, None]))
    keys = s.shape[1]
    return p[:, :keys], p[:, keys:], (again[:, :keys], again[:, keys:]), lse, slope


def in_three_orders(x: Operands, d_out: np.ndarray, d_lse: np.ndarray, dtype: str) -> list[Truth]:
    """The comparator three times, each summing in another order; two recompute the weights.

    One run on few elements may be exact by luck; the worst of three says what the dtype costs.
    """
    runs = [attend(x, d_out, d_lse, dtype)]
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        rows, keys, dims = (rng.permutation(n) for n in (*x.allowed.shape[2:], x.q.shape[-1]))
        pick = lambda a, axis, order: a if a is None or a.shape[axis] == 1 else a.take(order, axis)
        moved = dataclasses.replace(
            x,
            q=x.q[:, rows][..., dims],
            k=x.k[:, keys][..., dims],
            v=x.v[:, keys],
            allowed=x.allowed[:, :, rows][..., keys],
            bias=pick(pick(x.bias, 2, rows), 3, keys),
            scale=x.resolved_scale,
        )
        found = attend(moved, d_out[:, rows], d_lse[:, rows], dtype, recompute=True)
        row, key, dim = (np.argsort(order) for order in (rows, keys, dims))
        runs.append(
            Truth(
                found.out[:, row],
                found.lse[:, row],
                found.d_q[:, row][..., dim],
                found.d_k[:, key][..., dim],
                found.d_v[:, key],
                pick(pick(found.d_bias, 2, row), 3, key),
                found.d_sinks,
            )
        )
    return runs


def attend(
    x: Operands, d_out: np.ndarray, d_lse: np.ndarray, dtype: str, *, recompute: bool = False
) -> Truth:
    """Forward and backward; same results as `oracle.attend`, less exact.

    Args:
        x: the call.
        d_out: cotangent of out, [B, Tq, Hq, Dv].
        d_lse: cotangent of lse, [B, Tq, Hq].
        dtype: what every array is rounded to.
        recompute: the backward pass keeps the weights of the forward pass (as autodiff does), or
            only lse, and recomputes exp(s - lse) and d_out.out from it (as any backward pass
            without an N^2 array must). They differ by rounding, which shows where it cancels.
    """
    wide = np.dtype(np.float64 if dtype == "float64" else np.float32)
    rounded = _Rounding(np.dtype(getattr(ml_dtypes, dtype, dtype)), wide)
    group = x.q.shape[2] // x.k.shape[2]
    shape = (*x.q.shape[:3], x.v.shape[-1])
    out, lse = np.zeros(shape, wide), np.zeros(shape[:3], wide)
    d_q, d_k, d_v = (np.zeros(a.shape, wide) for a in (x.q, x.k, x.v))
    d_bias = np.zeros(x.allowed.shape, wide)
    d_sinks = np.zeros((x.q.shape[2], x.sink_logits(0).size), wide)
    for b, h in np.ndindex(*x.allowed.shape[:2]):
        g = h // group
        p, p_sinks, again, lse[b, :, h], slope = _probabilities(x, (b, h), rounded)
        q, k, v = (a.astype(wide) for a in (x.q[b, :, h], x.k[b, :, g], x.v[b, :, g]))
        do, dl = d_out[b, :, h].astype(wide), d_lse[b, :, h].astype(wide)[:, None]
        out[b, :, h] = rounded(rounded(p) @ v)
        dp = rounded(do @ v.T)
        through_out = (do * out[b, :, h] if recompute else p * dp).sum(axis=1, keepdims=True)
        p, p_sinks = again if recompute else (p, p_sinks)
        dx = rounded(rounded(p * (dp - through_out + dl)) * slope)
        scaled = rounded(dx * wide.type(x.resolved_scale))
        d_q[b, :, h] = rounded(scaled @ k)
        d_k[b, :, g] = rounded(d_k[b, :, g] + rounded(scaled.T @ q))
        d_v[b, :, g] = rounded(d_v[b, :, g] + rounded(rounded(p).T @ do))
        d_sinks[h] += (p_sinks * (dl - through_out)).sum(axis=0)
        d_bias[b, h] = dx
    if x.bias is not None:
        axes = tuple(a for a, n in enumerate(x.bias.shape) if n == 1 and d_bias.shape[a] != 1)
        d_bias = rounded(d_bias.sum(axis=axes, keepdims=True))
    return Truth(
        out,
        lse,
        d_q,
        d_k,
        d_v,
        None if x.bias is None else d_bias,
        None if x.sinks is None else d_sinks.reshape(x.sinks.shape),
    )
