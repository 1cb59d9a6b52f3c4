"""Attention and its gradients in float64 NumPy, a query row at a time; knows no blocks and no JAX.

For the keys j that row i may see, with cotangents `d_out` and `d_lse`:

    s_j   = cap(scale * q.k_j + bias_j)        cap(x) = c * tanh(x / c), or x without a softcap
    lse   = log(sum_j exp(s_j) + sum_t exp(sink_t))
    p_j   = exp(s_j - lse)                      out = sum_j p_j v_j
    ds_j  = p_j * (d_out.v_j - d_out.out + d_lse)
    dx_j  = ds_j * cap'(scale * q.k_j + bias_j)
    dq    = scale * sum_j dx_j k_j,  dk_j += scale * dx_j q,  dv_j += p_j d_out,  dbias_j = dx_j
    dsink_t += exp(sink_t - lse) * (d_lse - d_out.out)

A row that sees nothing returns out 0 and lse -inf (with sinks: the sinks' own lse).
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float


@dataclasses.dataclass(frozen=True)
class Truth:
    """What attention must return; a gradient is None when its operand was."""

    out: Float[np.ndarray, "B Tq Hq Dv"]
    lse: Float[np.ndarray, "B Tq Hq"]
    d_q: Float[np.ndarray, "B Tq Hq D"]
    d_k: Float[np.ndarray, "B Tk Hk D"]
    d_v: Float[np.ndarray, "B Tk Hk Dv"]
    d_bias: Float[np.ndarray, "..."] | None
    d_sinks: Float[np.ndarray, "..."] | None


@dataclasses.dataclass(frozen=True)
class Operands:
    """Float64 copies of one call's operands.

    Args:
        q: [B, Tq, Hq, D].
        k: [B, Tk, Hk, D].
        v: [B, Tk, Hk, Dv].
        allowed: [B, Hq, Tq, Tk], True where the pair exists.
        bias: broadcastable to [B, Hq, Tq, Tk], or None.
        sinks: [Hq] or [Hq, S], or None.
        softcap: the cap c, or None.
        scale: default 1 / sqrt(D).
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    allowed: Bool[np.ndarray, "B Hq Tq Tk"]
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    softcap: float | None = None
    scale: float | None = None

    @property
    def resolved_scale(self) -> float:
        """The scale in use."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def full_bias(self) -> np.ndarray:
        """The bias, or zeros, as a view [B, Hq, Tq, Tk]."""
        bias = np.zeros((1, 1, 1, 1)) if self.bias is None else self.bias.astype(np.float64)
        return np.broadcast_to(bias, self.allowed.shape)

    def sink_logits(self, head: int) -> np.ndarray:
        """The sink logits of one head, possibly none."""
        if self.sinks is None:
            return np.zeros(0)
        return self.sinks.astype(np.float64).reshape(self.sinks.shape[0], -1)[head]


@dataclasses.dataclass(frozen=True)
class _Row:
    """One query row: the keys it sees, its probabilities, and the slope of the cap."""

    seen: np.ndarray
    p: np.ndarray
    p_sinks: np.ndarray
    slope: np.ndarray
    lse: float


def _row(x: Operands, q: np.ndarray, k: np.ndarray, bias: np.ndarray, where) -> _Row:
    """Softmax of row `where = (b, h, i)` over the keys it sees."""
    b, h, i = where
    seen = np.flatnonzero(x.allowed[b, h, i])
    raw = x.resolved_scale * (k[seen] @ q) + bias[seen]
    if x.softcap is None:
        s, slope = raw, np.ones_like(raw)
    else:
        t = np.tanh(raw / x.softcap)
        s, slope = x.softcap * t, 1.0 - t * t
    logits = np.concatenate([s, x.sink_logits(h)])
    peak = logits.max() if logits.size else -np.inf
    if peak == -np.inf:
        return _Row(seen, np.zeros_like(s), np.zeros_like(x.sink_logits(h)), slope, -np.inf)
    lse = peak + np.log(np.exp(logits - peak).sum())
    p = np.exp(logits - lse)
    return _Row(seen, p[: seen.size], p[seen.size :], slope, float(lse))


def probabilities(x: Operands) -> np.ndarray:
    """The attention weights [B, Hq, Tq, Tk] of real keys (sinks take the rest of each row)."""
    p = np.zeros(x.allowed.shape)
    k, group = x.k.astype(np.float64), x.q.shape[2] // x.k.shape[2]
    for b, h, i in np.ndindex(*x.allowed.shape[:3]):
        row = _row(
            x, x.q[b, i, h].astype(np.float64), k[b, :, h // group], x.full_bias[b, h, i], (b, h, i)
        )
        p[b, h, i, row.seen] = row.p
    return p


def attend(x: Operands, d_out: np.ndarray | None = None, d_lse: np.ndarray | None = None) -> Truth:
    """Forward pass and gradients; without cotangents the gradients are zero.

    Args:
        x: the call.
        d_out: cotangent of out, [B, Tq, Hq, Dv].
        d_lse: cotangent of lse, [B, Tq, Hq].
    """
    q, k, v = (a.astype(np.float64) for a in (x.q, x.k, x.v))
    batch, q_tokens, q_heads, _ = q.shape
    group = q_heads // k.shape[2]
    bias = x.full_bias
    out = np.zeros((batch, q_tokens, q_heads, v.shape[-1]))
    lse = np.zeros((batch, q_tokens, q_heads))
    d_q, d_k, d_v = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    d_bias = None if x.bias is None else np.zeros(x.allowed.shape)
    d_sinks = np.zeros((q_heads, x.sink_logits(0).size))
    for b, h, i in np.ndindex(batch, q_heads, q_tokens):
        g = h // group
        row = _row(x, q[b, i, h], k[b, :, g], bias[b, h, i], (b, h, i))
        out[b, i, h] = row.p @ v[b, row.seen, g]
        lse[b, i, h] = row.lse
        if d_out is None or d_lse is None or row.lse == -np.inf:
            continue
        do, dl = d_out[b, i, h].astype(np.float64), float(d_lse[b, i, h])
        through_out = do @ out[b, i, h]
        dx = row.p * (v[b, row.seen, g] @ do - through_out + dl) * row.slope
        d_q[b, i, h] = x.resolved_scale * (dx @ k[b, row.seen, g])
        d_k[b, row.seen, g] += x.resolved_scale * np.outer(dx, q[b, i, h])
        d_v[b, row.seen, g] += np.outer(row.p, do)
        d_sinks[h] += row.p_sinks * (dl - through_out)
        if d_bias is not None:
            d_bias[b, h, i, row.seen] = dx
    return Truth(
        out,
        lse,
        d_q,
        d_k,
        d_v,
        None if d_bias is None or x.bias is None else _sum_to(d_bias, x.bias.shape),
        None if x.sinks is None else d_sinks.reshape(x.sinks.shape),
    )


def _sum_to(full: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Undo a broadcast: sum the axes that `shape` holds once."""
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and full.shape[a] != 1)
    return full.sum(axis=axes, keepdims=True)
