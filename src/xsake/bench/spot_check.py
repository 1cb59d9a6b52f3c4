"""Spot check of timed results: some rows are recomputed in float64 NumPy."""

import numpy as np
from jaxtyping import Bool, Float

QUERIES = 8
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Maximum error of a row / maximum sum of its absolute terms, by dtype."""


def spot_error(
    inputs: tuple,
    outputs: tuple,
    grid: Bool[np.ndarray, "Hq Nq Nk"] | None,
    *,
    block: int,
    seed: int,
) -> float:
    """Return the maximum error of the output, and of dQ if given, at some queries.

    Errors are relative to the sum of the absolute terms, so that cancellation does not count.

    Args:
        inputs: q, k, v and the cotangent of the output, [B, T, H, D].
        outputs: the output, or the output and dQ, dK, dV.
        grid: computed blocks; None: all visible ones.
        block: tokens of a block.
        seed: of the sampled queries.
    """
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in inputs)
    out, *gradients = (np.asarray(x, np.float64) for x in outputs)
    rng, errors = np.random.default_rng(seed), []
    for _ in range(QUERIES):
        at, row, head = (int(rng.integers(size)) for size in q.shape[:3])
        kv_head = head * k.shape[2] // q.shape[2]
        visible = _visible_keys(row, head, q.shape[1], k.shape[1], grid, block)
        keys, values = k[at, visible, kv_head], v[at, visible, kv_head]
        true, dq = _row(q[at, row, head], keys, values, cotangent[at, row, head])
        errors.append(_relative(out[at, row, head], true))
        if gradients:
            errors.append(_relative(gradients[0][at, row, head], dq))
    return float(np.max(errors))


def _visible_keys(
    row: int, head: int, q_tokens: int, kv_tokens: int, grid, block: int
) -> np.ndarray:
    if q_tokens != kv_tokens:
        return np.arange(kv_tokens)
    keys = np.arange(row + 1)
    return keys if grid is None else keys[grid[head, row // block, keys // block]]


def _row(q: Float[np.ndarray, " D"], keys, values, cotangent):
    """Return output and dq of one query, each with the sum of its absolute terms."""
    scale = len(q) ** -0.5
    scores = keys @ q * scale
    p = np.exp(scores - scores.max())
    p /= p.sum()
    out, dp = p @ values, values @ cotangent
    dq = scale * (p * (dp - out @ cotangent)) @ keys
    terms = scale * (p * (np.abs(dp) + np.abs(out @ cotangent))) @ np.abs(keys)
    return (out, p @ np.abs(values)), (dq, terms)


def _relative(actual: np.ndarray, true: tuple[np.ndarray, np.ndarray]) -> float:
    value, terms = true
    return float(np.abs(actual - value).max() / terms.max())
