"""Monotone calibration curves per head, and rules that use them: XAttention, Ada-KV, SpargeAttn."""

import dataclasses

import numpy as np
import scipy.optimize
from jaxtyping import Bool, Float

from benchmarks.baselines.estimators import (
    POOLED,
    MassEstimator,
    pooled_cost,
    pooled_mass,
    self_similarity,
)
from benchmarks.baselines.rule import (
    LayerSample,
    Ranking,
    RuleScope,
    Uncalibrated,
    causal_grid,
    forced_grid,
)
from benchmarks.baselines.top_p import descending_order, remaining_mass, remaining_row_mass
from xsake.errors import ArgumentError

BINS = 64
MIN_MASS = 1e-7  # lower end of the bins
TILT = 1e-4  # slope in log space, so that flat parts of a curve keep the order of the input

Samples = Float[np.ndarray, "Hq samples"]
Plane = Float[np.ndarray, "Hq Nq Nk"]
Cells = Bool[np.ndarray, "Hq Nq Nk"]


class HeadCurves:
    """Increasing curve of every head: the mean of `y` at a given `x`, both in 0..1.

    Samples are binned by `log x`, isotonic regression over the bin means makes each curve
    increasing, and `log y` is interpolated linearly in `log x`.

    Example:
        >>> curves, x = HeadCurves(), np.geomspace(1e-4, 1, 500)[None]
        >>> curves.add(0, x, x**2)
        >>> curves.finish()
        >>> curves(0, np.array([[0.1, 0.5]])).round(2)
        array([[0.01, 0.25]])
    """

    def __init__(self) -> None:
        self._sums: dict[int, Float[np.ndarray, "3 Hq bins"]] = {}
        self._curves: dict[int, list[Float[np.ndarray, "2 knots"]]] = {}

    def add(
        self,
        layer: int,
        x: Samples,
        y: Samples,
        is_sample: Bool[np.ndarray, "Hq samples"] | None = None,
    ) -> None:
        """Add samples of the heads of a layer, masked by `is_sample`."""
        heads, log_x = len(x), _log(x)
        weights = np.ones(log_x.shape) if is_sample is None else is_sample
        index = np.floor(log_x / np.log(MIN_MASS) * BINS).astype(int).clip(0, BINS - 1)
        index = (index + BINS * np.arange(heads)[:, None]).ravel()
        values = (weights, weights * log_x, weights * y)
        sums = np.stack([np.bincount(index, x.ravel(), heads * BINS) for x in values])
        self._sums[layer] = self._sums.get(layer, 0) + sums.reshape(3, heads, BINS)

    def finish(self) -> None:
        """Fit the curves to all samples."""
        self._curves = {
            layer: [_curve(*sums[:, head]) for head in range(sums.shape[1])]
            for layer, sums in self._sums.items()
        }

    def __call__(
        self, layer: int, x: Float[np.ndarray, "Hq *blocks"]
    ) -> Float[np.ndarray, "Hq *blocks"]:
        """Evaluate the curves of a layer's heads at `x`, strictly increasing."""
        if layer not in self._curves:
            raise ArgumentError(
                "rule-calibration",
                "the rule is not calibrated for this layer",
                got=f"{layer=}",
                expected=f"one of {sorted(self._curves)}",
                fix="call observe() with samples of every layer, then finish()",
            )
        log_x = _log(x)
        pairs = zip(log_x, self._curves[layer], strict=True)
        log_y = np.stack([np.interp(values, *curve) for values, curve in pairs])
        return np.exp(log_y + TILT * log_x)


@dataclasses.dataclass(frozen=True)
class EqualCoverage:
    """Cumulative rule with calibrated thresholds: a level is equal true coverage of all heads.

    XAttention (arXiv 2503.16428) fits a threshold per head offline, so that its estimate covers
    90% of the true mass. Here a curve per head maps the remaining estimated mass to the remaining
    true mass, fitted over all rows of the calibration samples. The priority of a block is the value
    of the curve: a level `t` is a threshold per head at which the dropped true mass is `t`, mean
    over the calibration rows. Sink, diagonal and previous block are forced and come first.

    Args:
        name: key in `RULES`.
        estimator: of block masses.
    """

    name: str
    estimator: MassEstimator
    scope: RuleScope = RuleScope.MODEL
    curves: HeadCurves = dataclasses.field(default_factory=HeadCurves, repr=False)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return self.estimator.cost(tokens, block, head_dim)

    def observe(self, sample: LayerSample) -> None:
        mass, first = self.estimator.mass(sample), forced_grid(sample.blocks)
        order = descending_order(mass, first=first)
        is_choice = causal_grid(sample.blocks) & ~first
        left, truth = remaining_mass(mass, order), remaining_mass(sample.true_masses(), order)
        self.curves.add(sample.layer, left[:, is_choice], truth[:, is_choice])

    def finish(self) -> None:
        self.curves.finish()

    def rank(self, sample: LayerSample) -> Ranking:
        left = remaining_row_mass(sample, self.estimator.mass(sample))
        return Ranking.of(self.curves(sample.layer, left), forced=forced_grid(sample.blocks))


@dataclasses.dataclass(frozen=True)
class AdaKv:
    """Blocks of the largest mass of the whole model (Ada-KV, arXiv 2407.11550, theorem 3.3).

    Heads compete for one budget by mass, not by the gain in the logarithm of the kept mass. Ada-KV
    sums the attention of the last queries over a cache; a prefill has rows instead, so the mass of
    a block is its pooled estimate mapped through a calibrated curve of the head, the mean true mass
    at a given estimate. The floor of Ada-KV for each head is the sink, the diagonal and the
    previous block.
    """

    name: str = "ada_kv"
    scope: RuleScope = RuleScope.MODEL
    curves: HeadCurves = dataclasses.field(default_factory=HeadCurves, repr=False)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return POOLED.cost(tokens, block, head_dim)

    def observe(self, sample: LayerSample) -> None:
        is_choice = causal_grid(sample.blocks) & ~forced_grid(sample.blocks)
        mass, truth = POOLED.mass(sample), sample.true_masses()
        self.curves.add(sample.layer, mass[:, is_choice], truth[:, is_choice])

    def finish(self) -> None:
        self.curves.finish()

    def rank(self, sample: LayerSample) -> Ranking:
        mass = self.curves(sample.layer, POOLED.mass(sample))
        return Ranking.of(mass, forced=forced_grid(sample.blocks))


def _log(x: Float[np.ndarray, "Hq *samples"]) -> Float[np.ndarray, "Hq *samples"]:
    return np.log(np.clip(x, MIN_MASS, 1.0, dtype=np.float64))


def _curve(
    counts: Float[np.ndarray, " bins"],
    log_x: Float[np.ndarray, " bins"],
    y: Float[np.ndarray, " bins"],
) -> Float[np.ndarray, "2 knots"]:
    """Return knots `(log x, log y)` of an increasing curve from bin sums in descending order."""
    filled = np.flatnonzero(counts)[::-1]
    if not filled.size:  # no selectable blocks in this head: any increasing curve is valid
        return np.array([[np.log(MIN_MASS), 0.0], [np.log(MIN_MASS), 0.0]])
    weights = counts[filled]
    means = scipy.optimize.isotonic_regression(y[filled] / weights, weights=weights).x
    return np.stack([log_x[filled] / weights, np.log(np.maximum(means, MIN_MASS**2))])


@dataclasses.dataclass(frozen=True)
class Sparge:
    """Cumulative pooled rule that computes blocks it cannot pool (SpargeAttn, arXiv 2502.18137).

    A block of queries or keys is dissimilar if the mean cosine over its pairs is below `theta`.
    Its row or column of blocks is selected first, dissimilar keys are excluded from the softmax
    over pooled scores, and other blocks are added until a share of that softmax is covered. The
    paper tunes this share per head for an error on calibration inputs; here a level is equal true
    coverage, by curves of heads as in `EqualCoverage`. If a budget is too small for all dissimilar
    blocks, they compete by pooled mass. The second stage of SpargeAttn skips products inside its
    kernel, not blocks, and is not modelled. Sink, diagonal and previous block are forced.

    Args:
        theta: minimum mean cosine of a block that may be pooled; 0.1 is the default of the authors'
            code. Larger values make whole heads dense before other heads get a block.
    """

    name: str = "sparge"
    scope: RuleScope = RuleScope.MODEL
    theta: float = 0.1
    curves: HeadCurves = dataclasses.field(default_factory=HeadCurves, repr=False)
    cost = staticmethod(pooled_cost)

    def observe(self, sample: LayerSample) -> None:
        forced = forced_grid(sample.blocks)
        dissimilar, mass = gate_masses(sample, pooled_mass(sample), self.theta)
        order = descending_order(mass, first=dissimilar | forced)
        left, truth = remaining_mass(mass, order), remaining_mass(sample.true_masses(), order)
        is_choice = causal_grid(sample.blocks) & ~forced & ~dissimilar
        flat = (x.reshape(sample.heads, -1) for x in (left, truth, is_choice))
        self.curves.add(sample.layer, *flat)

    def finish(self) -> None:
        self.curves.finish()

    def rank(self, sample: LayerSample) -> Ranking:
        forced, pooled = forced_grid(sample.blocks), pooled_mass(sample)
        dissimilar, mass = gate_masses(sample, pooled, self.theta)
        left = remaining_mass(mass, descending_order(mass, first=dissimilar | forced))
        priority = np.where(dissimilar, 1 + pooled, self.curves(sample.layer, left))
        return Ranking.of(priority, forced=forced)


@dataclasses.dataclass(frozen=True)
class SpargeTopK(Uncalibrated):
    """Top-k form of `Sparge`, with the defaults of the authors' current code.

    `spas_sage2_attn_meansim_topk_cuda`: `simthreshd1=-0.1`, and the mean of all keys is subtracted
    before similarities are computed, which changes no pooled softmax. Dissimilar blocks come first,
    then the same number of blocks by pooled mass in every row. Sink, diagonal and previous block
    are forced.
    """

    name: str = "sparge_top_k"
    scope: RuleScope = RuleScope.ROWS
    theta: float = -0.1
    cost = staticmethod(pooled_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        pooled = pooled_mass(sample)
        dissimilar, mass = gate_masses(sample, pooled, self.theta, center_keys=True)
        priority = np.where(dissimilar, 1 + pooled, mass)
        return Ranking.of(priority, forced=forced_grid(sample.blocks))


def gate_masses(
    sample: LayerSample, pooled: Plane, theta: float, *, center_keys: bool = False
) -> tuple[Cells, Plane]:
    """Return the dissimilar blocks, and the pooled masses of similar keys, normalised to one.

    A row without similar keys has mass 0.

    Args:
        sample: one layer of a document.
        pooled: pooled masses of all blocks.
        theta: minimum mean cosine of a block that may be pooled.
        center_keys: subtract the mean of all keys from keys.
    """
    group = sample.heads // sample.k.shape[1]
    keys = np.asarray(sample.k)
    keys = keys - keys.mean(axis=0) if center_keys else keys
    is_dissimilar_row = self_similarity(sample.q, sample.block) < theta
    is_dissimilar_key = np.repeat(self_similarity(keys, sample.block) < theta, group, axis=0)
    mass = np.where(is_dissimilar_key[:, None, :], 0, pooled)
    total = mass.sum(axis=-1, keepdims=True)
    mass = mass / np.where(total > 0, total, 1)
    return is_dissimilar_row[:, :, None] | is_dissimilar_key[:, None, :], mass
