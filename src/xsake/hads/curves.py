"""Selector corrections, loss curves and head summaries from measured masses."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from xsake.hads.budget import ForcedBlocks

FEATURES = 3  # the estimate, the estimate of the previous row, the uniform mass
MIN_MASS = 1e-9  # lower clip of the kept mass

Masses = Float[np.ndarray, "X n n"]  # X: heads of all layers


def fit_correction(
    documents: Iterable[tuple[Masses, Masses]], forced: ForcedBlocks
) -> Float[np.ndarray, "X 3"]:
    """Fit the weights of `selectors.correct_masses` by non-negative least squares, per head.

    Errors are divided by the estimate to the power 3/4. Absolute errors would be dominated by the
    heaviest blocks, which are selected anyway. Forced blocks are excluded.

    Args:
        documents: true masses and estimates of each.
        forced: blocks that are not selected.
    """
    gram: Any = 0.0
    for true, estimate in documents:
        n = true.shape[-1]
        mask, uniform = _selectable(n, forced), _uniform(n)
        previous = _shift_rows(estimate)
        for_head = []
        for head in range(len(true)):
            columns = estimate[head], previous[head], uniform, true[head]
            values = np.stack([column[mask] for column in columns]).astype(np.float64)
            values /= (0.7 * values[0] + 0.1 / n) ** 0.75
            for_head.append(values @ values.T)
        gram = gram + np.stack(for_head)
    return np.stack([_solve_nonnegative(each) for each in gram])


def _solve_nonnegative(gram: Float[np.ndarray, "F1 F1"]) -> Float[np.ndarray, " F"]:
    left, right = gram[:-1, :-1], gram[:-1, -1]
    size = np.trace(left)
    if size <= 0:  # no selectable blocks: keep the estimate
        return np.eye(FEATURES)[0]
    root = np.linalg.cholesky(left + 1e-9 * size * np.eye(FEATURES))
    import scipy.optimize  # takes a second to import, used by calibration only

    weights, _ = scipy.optimize.nnls(root.T, np.linalg.solve(root, right))
    return weights if weights.any() else np.eye(FEATURES)[0]


def correct_estimates(estimate: Masses, weights: Float[np.ndarray, "X 3"]) -> Masses:
    """Apply `selectors.correct_masses` in NumPy."""
    w0, w1, w2 = (weights[:, i, None, None] for i in range(FEATURES))
    uniform = _uniform(estimate.shape[-1])
    return (w0 * estimate + w1 * _shift_rows(estimate) + w2 * uniform).astype(np.float32)


def _shift_rows(masses: Masses) -> Masses:
    """Return the masses of the previous row, 0 in the first."""
    return np.concatenate([np.zeros_like(masses[:, :1]), masses[:, :-1]], axis=1)


def _uniform(n: int) -> Float[np.ndarray, "n n"]:
    return np.tri(n) / np.arange(1, n + 1)[:, None]


def loss_curve(true: Masses, order: Masses, forced: ForcedBlocks) -> Float[np.ndarray, "X n1"]:
    """Return the mean over rows of -log(kept mass) at max(forced, k) blocks per row, k in 0..n."""
    n = true.shape[-1]
    mask = _selectable(n, forced)
    ranked = np.argsort(np.where(mask, -order, np.inf), axis=-1, kind="stable")
    gains = np.take_along_axis(np.where(mask, true, 0), ranked, axis=-1)
    start = np.where(forced.grid(n), true, 0).sum(-1, keepdims=True)
    kept = np.cumsum(np.concatenate([start, gains], axis=-1), axis=-1, dtype=np.float64)
    extra = np.maximum(np.arange(n + 1)[None] - forced.counts(n)[:, None], 0)
    losses = -np.log(np.clip(kept, MIN_MASS, 1))
    return np.take_along_axis(losses, np.broadcast_to(extra, losses.shape), axis=-1).mean(1)


def summarize(true: Masses, forced: ForcedBlocks) -> dict[str, np.ndarray]:
    """Return the statistics of a profile for each head on one document, by field."""
    n = true.shape[-1]
    visible = np.arange(1, n + 1)
    logs = np.log(np.where(true > 0, true, 1))
    heaviest = np.sort(true, axis=-1)[..., ::-1].cumsum(-1, dtype=np.float64)
    need = np.minimum((heaviest < 0.9).sum(-1) + 1, visible)
    offsets = [np.diagonal(true, -d, 1, 2).mean(-1) for d in range(n)]
    columns = [true[:, j + 1 :, j].mean(-1) if j + 1 < n else true[:, 0, 0] * 0 for j in range(n)]
    return {
        "block_entropy": -(true * logs).sum(-1).mean(-1),
        "need90": (need / visible).mean(-1),
        "outside": np.where(_selectable(n, forced), true, 0).sum(-1).mean(-1),
        "offset_mass": np.stack(offsets, -1),
        "column_mass": np.stack(columns, -1),
    }


def _selectable(n: int, forced: ForcedBlocks) -> Bool[np.ndarray, "n n"]:
    """Return True for visible blocks that are not forced."""
    return np.tri(n, dtype=bool) & ~forced.grid(n)
