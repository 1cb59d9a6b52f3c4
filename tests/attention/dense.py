"""Dense float64 attention for a boolean table of pairs: what these tests compare with."""

import numpy as np


def attend(q, k, v, allowed, bias=0.0, scale=None):
    """Output [B, Tq, Hq, Dv]; `allowed` broadcasts to [B, Hq, Tq, Tk]; empty rows give zeros."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits = np.where(allowed, logits + bias, -np.inf)
    peak = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(peak == -np.inf, 0, peak))
    mass = weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights / np.where(mass == 0, 1, mass), v)


def draw(seed=0, *, batch=1, q_tokens=40, kv_tokens=None, q_heads=2, kv_heads=1, dim=8, value=8):
    """q, k and v in float32 NumPy."""
    rng = np.random.default_rng(seed)
    kv_tokens = q_tokens if kv_tokens is None else kv_tokens
    shapes = (
        (batch, q_tokens, q_heads, dim),
        (batch, kv_tokens, kv_heads, dim),
        (batch, kv_tokens, kv_heads, value),
    )
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
