"""Selector corrections, loss curves and head summaries from measured masses."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from xsake.hads.budget import ForcedBlocks

FEATURES = 3  # the estimate, the estimate of the previous row, the uniform mass
MIN_MASS = 1e-9  # lower clip of the kept mass


class Correction:
    """Non-negative least squares fit of the weights of `selectors.correct_masses`, per head.

    Errors are divided by the estimate to the power 3/4. Absolute errors would be dominated by the
    heaviest blocks, which are selected anyway.

    Args:
        heads: of all layers.
        n: blocks of a row at the calibrated length.
        forced: excluded, because they are not selected.
    """

    def __init__(self, heads: int, n: int, forced: ForcedBlocks):
        self._selectable = _selectable(n, forced)
        self._uniform = (np.tri(n) / np.arange(1, n + 1)[:, None])[self._selectable]
        self._gram = np.zeros((heads, FEATURES + 1, FEATURES + 1))

    def add(self, true: Float[np.ndarray, "X n n"], estimate: Float[np.ndarray, "X n n"]) -> None:
        """Add one document, all heads."""
        n, mask = true.shape[-1], self._selectable
        for head, (masses, current) in enumerate(zip(true, estimate, strict=True)):
            previous = np.concatenate([np.zeros_like(current[:1]), current[:-1]])
            columns = [current[mask], previous[mask], self._uniform, masses[mask]]
            values = np.stack(columns).astype(np.float64)
            values /= (0.7 * values[0] + 0.1 / n) ** 0.75
            self._gram[head] += values @ values.T

    def weights(self) -> Float[np.ndarray, "X 3"]:
        """Return the fitted weights of each head."""
        return np.stack([_solve_nonnegative(gram) for gram in self._gram])


def _solve_nonnegative(gram: Float[np.ndarray, "F1 F1"]) -> Float[np.ndarray, " F"]:
    left, right = gram[:-1, :-1], gram[:-1, -1]
    size = np.trace(left)
    if size <= 0:  # no selectable blocks: keep the estimate
        return np.eye(FEATURES)[0]
    root = np.linalg.cholesky(left + 1e-9 * size * np.eye(FEATURES))
    import scipy.optimize  # takes a second to import, used by calibration only

    weights, _ = scipy.optimize.nnls(root.T, np.linalg.solve(root, right))
    return weights if weights.any() else np.eye(FEATURES)[0]


def correct_estimates(
    estimate: Float[np.ndarray, "X n n"], weights: Float[np.ndarray, "X 3"]
) -> Float[np.ndarray, "X n n"]:
    """Apply `selectors.correct_masses` in NumPy."""
    n = estimate.shape[-1]
    previous = np.concatenate([np.zeros_like(estimate[:, :1]), estimate[:, :-1]], axis=1)
    uniform = np.tri(n) / np.arange(1, n + 1)[:, None]
    w0, w1, w2 = (weights[:, i, None, None] for i in range(FEATURES))
    return (w0 * estimate + w1 * previous + w2 * uniform).astype(np.float32)


def loss_curve(
    true: Float[np.ndarray, "X n n"], order: Float[np.ndarray, "X n n"], forced: ForcedBlocks
) -> Float[np.ndarray, "X n1"]:
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


@dataclasses.dataclass(frozen=True)
class HeadSummary:
    """Statistics of each head on one document; see `Profile`."""

    block_entropy: Float[np.ndarray, " X"]
    need90: Float[np.ndarray, " X"]
    outside: Float[np.ndarray, " X"]
    offset_mass: Float[np.ndarray, "X n"]
    column_mass: Float[np.ndarray, "X n"]


def summarise(true: Float[np.ndarray, "X n n"], forced: ForcedBlocks) -> HeadSummary:
    """Summarize the true masses of one document."""
    n = true.shape[-1]
    visible = np.arange(1, n + 1)
    logs = np.log(np.where(true > 0, true, 1))
    heaviest = np.sort(true, axis=-1)[..., ::-1].cumsum(-1, dtype=np.float64)
    need = np.minimum((heaviest < 0.9).sum(-1) + 1, visible)
    offsets = [np.diagonal(true, -d, 1, 2).mean(-1) for d in range(n)]
    columns = [true[:, j + 1 :, j].mean(-1) if j + 1 < n else true[:, 0, 0] * 0 for j in range(n)]
    return HeadSummary(
        block_entropy=-(true * logs).sum(-1).mean(-1),
        need90=(need / visible).mean(-1),
        outside=np.where(_selectable(n, forced), true, 0).sum(-1).mean(-1),
        offset_mass=np.stack(offsets, -1),
        column_mass=np.stack(columns, -1),
    )


def _selectable(n: int, forced: ForcedBlocks) -> Bool[np.ndarray, "n n"]:
    """Return True for visible blocks that are not forced."""
    return np.tri(n, dtype=bool) & ~forced.grid(n)
