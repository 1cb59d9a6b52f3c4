"""Attention and its gradients in float64 NumPy, one query row at a time.

For the allowed keys j of row i, with cotangents `d_out` and `d_lse`:

    s_j   = cap(scale * q.k_j + bias_j)        cap(x) = c * tanh(x / c), or x without a softcap
    lse   = log(sum_j exp(s_j) + sum_t exp(sink_t))
    p_j   = exp(s_j - lse)                      out = sum_j p_j v_j
    ds_j  = p_j * (d_out.v_j - d_out.out + d_lse)
    dx_j  = ds_j * cap'(scale * q.k_j + bias_j)
    dq    = scale * sum_j dx_j k_j,  dk_j += scale * dx_j q,  dv_j += p_j d_out,  dbias_j = dx_j
    dsink_t += exp(sink_t - lse) * (d_lse - d_out.out)

A fully masked row has out 0 and lse -inf (with sinks: the lse of the sinks).
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float


@dataclasses.dataclass(frozen=True)
class Truth:
    """Outputs and gradients; the gradient of an absent operand is None."""

    out: Float[np.ndarray, "B Tq Hq Dv"]
    lse: Float[np.ndarray, "B Tq Hq"]
    d_q: Float[np.ndarray, "B Tq Hq D"]
    d_k: Float[np.ndarray, "B Tk Hk D"]
    d_v: Float[np.ndarray, "B Tk Hk Dv"]
    d_bias: Float[np.ndarray, "..."] | None
    d_sinks: Float[np.ndarray, "..."] | None


@dataclasses.dataclass(frozen=True)
class DenseInputs:
    """Inputs of one dense attention call."""

    q: np.ndarray  # [B, Tq, Hq, D]
    k: np.ndarray  # [B, Tk, Hk, D]
    v: np.ndarray  # [B, Tk, Hk, Dv]
    allowed: Bool[np.ndarray, "B Hq Tq Tk"]
    bias: np.ndarray | None = None  # broadcastable to [B, Hq, Tq, Tk]
    sinks: np.ndarray | None = None  # [Hq] or [Hq, S]
    softcap: float | None = None  # the cap c
    scale: float | None = None  # default 1 / sqrt(D)

    @property
    def resolved_scale(self) -> float:
        """Scale, 1 / sqrt(D) by default."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def full_bias(self) -> np.ndarray:
        """Bias or zeros, broadcast to [B, Hq, Tq, Tk]."""
        bias = np.zeros((1, 1, 1, 1)) if self.bias is None else self.bias.astype(np.float64)
        return np.broadcast_to(bias, self.allowed.shape)

    def sink_logits(self, head: int) -> np.ndarray:
        """Return the sink logits of one head, possibly empty."""
        if self.sinks is None:
            return np.zeros(0)
        return self.sinks.astype(np.float64).reshape(self.sinks.shape[0], -1)[head]


@dataclasses.dataclass(frozen=True)
class _QueryRow:
    """One query row: visible keys, probabilities and derivative of the softcap."""

    visible: np.ndarray
    p: np.ndarray
    p_sinks: np.ndarray
    slope: np.ndarray
    lse: float


def _row(x: DenseInputs, q: np.ndarray, k: np.ndarray, bias: np.ndarray, index) -> _QueryRow:
    """Compute the softmax of row `index = (b, h, i)` over its visible keys."""
    b, h, i = index
    visible = np.flatnonzero(x.allowed[b, h, i])
    raw = x.resolved_scale * (k[visible] @ q) + bias[visible]
    if x.softcap is None:
        s, slope = raw, np.ones_like(raw)
    else:
        t = np.tanh(raw / x.softcap)
        s, slope = x.softcap * t, 1.0 - t * t
    logits = np.concatenate([s, x.sink_logits(h)])
    m = logits.max() if logits.size else -np.inf
    if m == -np.inf:
        return _QueryRow(visible, np.zeros_like(s), np.zeros_like(x.sink_logits(h)), slope, -np.inf)
    lse = m + np.log(np.exp(logits - m).sum())
    p = np.exp(logits - lse)
    return _QueryRow(visible, p[: visible.size], p[visible.size :], slope, float(lse))


def probabilities(x: DenseInputs) -> np.ndarray:
    """Return the attention probabilities [B, Hq, Tq, Tk]; sinks take the rest of each row."""
    p = np.zeros(x.allowed.shape)
    k, group = x.k.astype(np.float64), x.q.shape[2] // x.k.shape[2]
    for b, h, i in np.ndindex(*x.allowed.shape[:3]):
        row = _row(
            x, x.q[b, i, h].astype(np.float64), k[b, :, h // group], x.full_bias[b, h, i], (b, h, i)
        )
        p[b, h, i, row.visible] = row.p
    return p


def attend(
    x: DenseInputs, d_out: np.ndarray | None = None, d_lse: np.ndarray | None = None
) -> Truth:
    """Compute outputs and gradients; without cotangents the gradients are zero.

    Args:
        x: inputs of the call.
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
        out[b, i, h] = row.p @ v[b, row.visible, g]
        lse[b, i, h] = row.lse
        if d_out is None or d_lse is None or row.lse == -np.inf:
            continue
        do, dl = d_out[b, i, h].astype(np.float64), float(d_lse[b, i, h])
        delta = do @ out[b, i, h]
        dx = row.p * (v[b, row.visible, g] @ do - delta + dl) * row.slope
        d_q[b, i, h] = x.resolved_scale * (dx @ k[b, row.visible, g])
        d_k[b, row.visible, g] += x.resolved_scale * np.outer(dx, q[b, i, h])
        d_v[b, row.visible, g] += np.outer(row.p, do)
        d_sinks[h] += row.p_sinks * (dl - delta)
        if d_bias is not None:
            d_bias[b, h, i, row.visible] = dx
    if d_bias is not None and x.bias is not None:
        d_bias = sum_to(d_bias, x.bias.shape)
    d_sinks = None if x.sinks is None else d_sinks.reshape(x.sinks.shape)
    return Truth(out, lse, d_q, d_k, d_v, d_bias, d_sinks)


def sum_to(full: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Sum `full` over the axes that have size 1 in `shape`."""
    axes = tuple(a for a, n in enumerate(shape) if n == 1 and full.shape[a] != 1)
    return full.sum(axis=axes, keepdims=True)
