"""Causal block-sparse attention and its gradients in float64 NumPy, apart from the library."""

import numpy as np

TOLERANCE = 1e-4
"""Largest accepted error of a float32 result, relative to the largest true value: 100 times what a
sound implementation shows, far below what a wrong mask causes."""


def true_attention(
    arrays: dict[str, np.ndarray], grid: np.ndarray, block: int, *, is_backward: bool
) -> dict[str, np.ndarray]:
    """`out`, or `dq`, `dk`, `dv` of `sum(out * cotangent)`, over the listed blocks, causal.

    Args:
        arrays: q, k, v, cotangent, `[B, T, H, D]` each with equal heads.
        grid: `[H, Nq, Nk]`, True where a block is listed.
        block: tokens per block side.
        is_backward: gradients instead of the output.
    """
    q, k, v, cotangent = (
        np.moveaxis(arrays[name].astype(np.float64), 2, 1) for name in ("q", "k", "v", "cotangent")
    )
    scale = q.shape[-1] ** -0.5
    out, dq, dk, dv = (np.zeros_like(v if name in "ov" else q) for name in ("o", "q", "k", "v"))
    for batch, head, row in np.ndindex(q.shape[0], q.shape[1], grid.shape[1]):
        at = (batch, head)
        queries = np.arange(row * block, min((row + 1) * block, q.shape[2]))
        keys = np.flatnonzero(np.repeat(grid[head, row], block)[: k.shape[2]])
        if not len(keys):
            continue
        logits = scale * (q[at][queries] @ k[at][keys].T)
        logits[keys[None, :] > queries[:, None]] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[at][queries] = weights @ v[at][keys]
        if is_backward:
            upstream = cotangent[at][queries]
            dv[at][keys] += weights.T @ upstream
            mean = np.sum(upstream * out[at][queries], -1, keepdims=True)
            dlogits = weights * (upstream @ v[at][keys].T - mean) * scale
            dq[at][queries] = dlogits @ k[at][keys]
            dk[at][keys] += dlogits.T @ q[at][queries]
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
