"""Is a timed result right? Some of its rows, computed once more in float64 NumPy from the grid."""

import numpy as np
from jaxtyping import Bool, Float

QUERIES = 8
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
"""Largest error of a row over the largest sum of its terms' sizes, by dtype."""


def spot_error(
    inputs: tuple,
    found: tuple,
    grid: Bool[np.ndarray, "Hq Nq Nk"] | None,
    *,
    block: int,
    seed: int,
) -> float:
    """Largest error of the output, and of dQ if there is one, at some queries.

    Relative to the sum of the absolute terms, so that terms which cancel do not count as errors.

    Args:
        inputs: q, k, v and the output's cotangent, [B, T, H, D].
        found: the output, or the output and dQ, dK, dV.
        grid: the blocks that were computed; None: all that is visible.
        block: tokens of a block.
        seed: draws batch, head and query of each row.
    """
    q, k, v, cotangent = (np.asarray(x, np.float64) for x in inputs)
    out, *gradients = (np.asarray(x, np.float64) for x in found)
    random, errors = np.random.default_rng(seed), []
    for _ in range(QUERIES):
        at, row, head = (int(random.integers(size)) for size in q.shape[:3])
        own = head * k.shape[2] // q.shape[2]
        seen = _seen(row, head, q.shape[1], k.shape[1], grid, block)
        keys, values = k[at, seen, own], v[at, seen, own]
        true, slope = _row(q[at, row, head], keys, values, cotangent[at, row, head])
        errors.append(_relative(out[at, row, head], true))
        if gradients:
            errors.append(_relative(gradients[0][at, row, head], slope))
    return float(np.max(errors))


def _seen(row: int, head: int, q_tokens: int, kv_tokens: int, grid, block: int) -> np.ndarray:
    if q_tokens != kv_tokens:
        return np.arange(kv_tokens)
    keys = np.arange(row + 1)
    return keys if grid is None else keys[grid[head, row // block, keys // block]]


def _row(q: Float[np.ndarray, " D"], keys, values, cotangent):
    """`(output, gradient by q)` of one query, each with the sum of its terms' sizes."""
    scale = len(q) ** -0.5
    scores = keys @ q * scale
    weights = np.exp(scores - scores.max())
    weights /= weights.sum()
    out, pulls = weights @ values, values @ cotangent
    slope = scale * (weights * (pulls - out @ cotangent)) @ keys
    terms = scale * (weights * (np.abs(pulls) + np.abs(out @ cotangent))) @ np.abs(keys)
    return (out, weights @ np.abs(values)), (slope, terms)


def _relative(found: np.ndarray, true: tuple[np.ndarray, np.ndarray]) -> float:
    value, terms = true
    return float(np.abs(found - value).max() / terms.max())
