"""Causal block-sparse attention and its gradients in float64 NumPy, apart from the library."""

import numpy as np

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest accepted error of a result, relative to the largest true value: far above what a sound
implementation shows (100 times in float32), far below what a wrong mask causes."""


def true_attention(
    arrays: dict[str, np.ndarray], grid: np.ndarray | None, block: int, *, is_backward: bool
) -> dict[str, np.ndarray]:
    """`out`, or `dq`, `dk`, `dv` of `sum(out * cotangent)`, over the listed blocks, causal.

    Args:
        arrays: q and cotangent `[B, Tq, Hq, D]`, k and v `[B, Tk, Hk, D]`; the last query is at the
            position of the last key.
        grid: `[Hq, Nq, Nk]`, True where a block is listed; None: all are.
        block: tokens per block side.
        is_backward: gradients instead of the output.
    """
    q, k, v, cotangent = (
        np.moveaxis(arrays[name].astype(np.float64), 2, 1) for name in ("q", "k", "v", "cotangent")
    )
    scale = q.shape[-1] ** -0.5
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    (heads, tokens), (kv_heads, kv_tokens) = q.shape[1:3], k.shape[1:3]
    past = kv_tokens - tokens
    for batch, head, row in np.ndindex(q.shape[0], heads, -(-tokens // block)):
        at, kv = (batch, head), (batch, head * kv_heads // heads)
        queries = np.arange(row * block, min((row + 1) * block, tokens))
        keys = np.arange(past + queries[-1] + 1)
        if grid is not None:
            keys = np.flatnonzero(np.repeat(grid[head, row], block)[:kv_tokens])
        if not len(keys):
            continue
        logits = scale * (q[at][queries] @ k[kv][keys].T)
        logits[keys[None, :] > past + queries[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[at][queries] = weights @ v[kv][keys]
        if is_backward:
            upstream = cotangent[at][queries]
            dv[kv][keys] += weights.T @ upstream
            mean = np.sum(upstream * out[at][queries], -1, keepdims=True)
            dlogits = weights * (upstream @ v[kv][keys].T - mean) * scale
            dq[at][queries] = dlogits @ k[kv][keys]
            dk[kv][keys] += dlogits.T @ q[at][queries]
    found = {"dq": dq, "dk": dk, "dv": dv} if is_backward else {"out": out}
    return {name: np.moveaxis(array, 1, 2) for name, array in found.items()}


def relative_error(measured: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    """Largest error over the largest true value, worst array; infinite for a bad shape or NaN."""
    worst = 0.0
    for name, true in truth.items():
        array = measured[name]
        if array.shape != true.shape or not np.isfinite(array).all():
            return float("inf")
        worst = max(worst, float(np.abs(array - true).max() / np.abs(true).max()))
    return worst
