"""What the masses of documents say about heads: corrections of a selector, curves, summaries."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from xsake.hads.budget import AlwaysOn

FEATURES = 3  # own estimate, the estimate of the row before, the even share
LEAST_MASS = 1e-9  # kept mass below it counts as this much


class Correction:
    """The weights of `selectors.mixed` for every head, by least squares with weights >= 0.

    Errors count relative to the size of an estimate (to the power 3/4): by absolute errors the
    heaviest blocks, which are chosen anyway, would decide everything.

    Args:
        heads: of all layers.
        n: blocks of a row at the calibrated length.
        always: left out, because nobody chooses among them.
    """

    def __init__(self, heads: int, n: int, always: AlwaysOn):
        self._open = _open(n, always)
        self._even = (np.tri(n) / np.arange(1, n + 1)[:, None])[self._open]
        self._gram = np.zeros((heads, FEATURES + 1, FEATURES + 1))

    def add(self, true: Float[np.ndarray, "X n n"], estimate: Float[np.ndarray, "X n n"]) -> None:
        """One document, all heads."""
        n = true.shape[-1]
        for head, (masses, own) in enumerate(zip(true, estimate, strict=True)):
            before = np.concatenate([np.zeros_like(own[:1]), own[:-1]])
            columns = [own[self._open], before[self._open], self._even, masses[self._open]]
            values = np.stack(columns).astype(np.float64)
            values /= (0.7 * values[0] + 0.1 / n) ** 0.75
            self._gram[head] += values @ values.T

    def weights(self) -> Float[np.ndarray, "X 3"]:
        """The best weights of each head."""
        return np.stack([_nonnegative(gram) for gram in self._gram])


def _nonnegative(gram: Float[np.ndarray, "F1 F1"]) -> Float[np.ndarray, " F"]:
    left, right = gram[:-1, :-1], gram[:-1, -1]
    size = np.trace(left)
    if size <= 0:  # nothing to choose among: trust the estimate
        return np.eye(FEATURES)[0]
    root = np.linalg.cholesky(left + 1e-9 * size * np.eye(FEATURES))
    import scipy.optimize  # here: it takes a second, and only calibration needs it

    found, _ = scipy.optimize.nnls(root.T, np.linalg.solve(root, right))
    return found if found.any() else np.eye(FEATURES)[0]


def corrected(
    estimate: Float[np.ndarray, "X n n"], weights: Float[np.ndarray, "X 3"]
) -> Float[np.ndarray, "X n n"]:
    """`selectors.mixed` in NumPy, for measuring."""
    n = estimate.shape[-1]
    before = np.concatenate([np.zeros_like(estimate[:, :1]), estimate[:, :-1]], axis=1)
    even = np.tri(n) / np.arange(1, n + 1)[:, None]
    own, previous, flat = (weights[:, i, None, None] for i in range(FEATURES))
    return (own * estimate + previous * before + flat * even).astype(np.float32)


def curve(
    true: Float[np.ndarray, "X n n"], order: Float[np.ndarray, "X n n"], always: AlwaysOn
) -> Float[np.ndarray, "X n1"]:
    """Mean over rows of -log(kept mass) when rows keep max(always-on, k) blocks, for k in 0..n.

    Args:
        true: what blocks weigh.
        order: what a selector thinks they weigh: it takes the heaviest first.
        always: kept in any case.
    """
    n = true.shape[-1]
    is_open = _open(n, always)
    taken = np.argsort(np.where(is_open, -order, np.inf), axis=-1, kind="stable")
    gains = np.take_along_axis(np.where(is_open, true, 0), taken, axis=-1)
    start = np.where(always.grid(n), true, 0).sum(-1, keepdims=True)
    kept = np.cumsum(np.concatenate([start, gains], axis=-1), axis=-1, dtype=np.float64)
    extra = np.maximum(np.arange(n + 1)[None] - always.counts(n)[:, None], 0)
    losses = -np.log(np.clip(kept, LEAST_MASS, 1))
    return np.take_along_axis(losses, np.broadcast_to(extra, losses.shape), axis=-1).mean(1)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What one document says about each head."""

    block_entropy: Float[np.ndarray, " X"]
    need90: Float[np.ndarray, " X"]
    outside: Float[np.ndarray, " X"]
    offset_mass: Float[np.ndarray, "X n"]
    column_mass: Float[np.ndarray, "X n"]


def summarise(true: Float[np.ndarray, "X n n"], always: AlwaysOn) -> Summary:
    """Numbers about heads that people and policies read."""
    n = true.shape[-1]
    seen = np.arange(1, n + 1)
    logs = np.log(np.where(true > 0, true, 1))
    heaviest = np.sort(true, axis=-1)[..., ::-1].cumsum(-1, dtype=np.float64)
    need = np.minimum((heaviest < 0.9).sum(-1) + 1, seen)
    offsets = [np.diagonal(true, -d, 1, 2).mean(-1) for d in range(n)]
    columns = [true[:, j + 1 :, j].mean(-1) if j + 1 < n else true[:, 0, 0] * 0 for j in range(n)]
    return Summary(
        block_entropy=-(true * logs).sum(-1).mean(-1),
        need90=(need / seen).mean(-1),
        outside=np.where(_open(n, always), true, 0).sum(-1).mean(-1),
        offset_mass=np.stack(offsets, -1),
        column_mass=np.stack(columns, -1),
    )


def _open(n: int, always: AlwaysOn) -> Bool[np.ndarray, "n n"]:
    """Visible blocks that somebody has to choose among."""
    return np.tri(n, dtype=bool) & ~always.grid(n)
