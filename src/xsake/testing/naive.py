"""Naive dense attention in the caller's dtype, forward and backward, for the error budget.

Operands and results of matrix products have the input dtype; softmax statistics are at least
float32. It uses NumPy because XLA may keep intermediate results in a wider dtype.
"""

import dataclasses
from typing import NamedTuple

import ml_dtypes
import numpy as np

from xsake.testing.oracle import DenseInputs, Truth, sum_to


class _Rounding(NamedTuple):
    """Rounding to `narrow` with arithmetic in `wide`."""

    narrow: np.dtype
    wide: np.dtype

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x.astype(self.narrow).astype(self.wide)


def _probabilities(x: DenseInputs, at: tuple[int, int], rounded: _Rounding):
    """Return p of keys, of sinks, both recomputed from lse, lse and softcap slope of a head."""
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
    m = logits.max(axis=1, keepdims=True, initial=-np.inf)
    empty = m == -np.inf
    weights = np.exp(logits - np.where(empty, rounded.wide.type(0), m))
    denominator = weights.sum(axis=1, keepdims=True)
    p = weights / np.where(empty, rounded.wide.type(1), denominator)
    lse = np.where(empty, m, m + np.log(np.where(empty, 1, denominator)))[:, 0]
    recomputed = np.exp(logits - np.where(empty, rounded.wide.type(0), lse[:, None]))
    keys = s.shape[1]
    return p[:, :keys], p[:, keys:], (recomputed[:, :keys], recomputed[:, keys:]), lse, slope


def run_three_orders(
    x: DenseInputs, d_out: np.ndarray, d_lse: np.ndarray, dtype: str
) -> list[Truth]:
    """Run naive attention with three summation orders; two recompute p from lse.

    A single run on few elements may be exact by chance; the worst of three is used.
    """
    runs = [attend(x, d_out, d_lse, dtype)]
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        rows, keys, dims = (rng.permutation(n) for n in (*x.allowed.shape[2:], x.q.shape[-1]))
        permute = lambda a, axis, order: (
            a if a is None or a.shape[axis] == 1 else a.take(order, axis)
        )
        permuted = dataclasses.replace(
            x, q=x.q[:, rows][..., dims], k=x.k[:, keys][..., dims], v=x.v[:, keys],
            allowed=x.allowed[:, :, rows][..., keys],
            bias=permute(permute(x.bias, 2, rows), 3, keys), scale=x.resolved_scale,
        )  # fmt: skip
        result = attend(permuted, d_out[:, rows], d_lse[:, rows], dtype, recompute=True)
        row, key, dim = (np.argsort(order) for order in (rows, keys, dims))
        runs.append(
            Truth(
                result.out[:, row], result.lse[:, row], result.d_q[:, row][..., dim],
                result.d_k[:, key][..., dim], result.d_v[:, key],
                permute(permute(result.d_bias, 2, row), 3, key), result.d_sinks,
            )
        )  # fmt: skip
    return runs


def attend(
    x: DenseInputs, d_out: np.ndarray, d_lse: np.ndarray, dtype: str, *, recompute: bool = False
) -> Truth:
    """Compute outputs and gradients in `dtype`; see `oracle.attend`.

    Args:
        x: inputs of the call.
        d_out: cotangent of out, [B, Tq, Hq, Dv].
        d_lse: cotangent of lse, [B, Tq, Hq].
        dtype: dtype of every array.
        recompute: recompute p = exp(s - lse) and delta = d_out.out in the backward pass, as flash
            attention does, instead of saving p, as autodiff does. They differ by rounding.
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
        p, p_sinks, recomputed, lse[b, :, h], slope = _probabilities(x, (b, h), rounded)
        q, k, v = (a.astype(wide) for a in (x.q[b, :, h], x.k[b, :, g], x.v[b, :, g]))
        do, dl = d_out[b, :, h].astype(wide), d_lse[b, :, h].astype(wide)[:, None]
        out[b, :, h] = rounded(rounded(p) @ v)
        dp = rounded(do @ v.T)
        delta = (do * out[b, :, h] if recompute else p * dp).sum(axis=1, keepdims=True)
        p, p_sinks = recomputed if recompute else (p, p_sinks)
        dx = rounded(rounded(p * (dp - delta + dl)) * slope)
        scaled = rounded(dx * wide.type(x.resolved_scale))
        d_q[b, :, h] = rounded(scaled @ k)
        d_k[b, :, g] = rounded(d_k[b, :, g] + rounded(scaled.T @ q))
        d_v[b, :, g] = rounded(d_v[b, :, g] + rounded(rounded(p).T @ do))
        d_sinks[h] += (p_sinks * (dl - delta)).sum(axis=0)
        d_bias[b, h] = dx
    d_bias = None if x.bias is None else rounded(sum_to(d_bias, x.bias.shape))
    d_sinks = None if x.sinks is None else d_sinks.reshape(x.sinks.shape)
    return Truth(out, lse, d_q, d_k, d_v, d_bias, d_sinks)
