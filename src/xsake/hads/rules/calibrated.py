"""Monotone curves of heads, learnt from true masses, and the rules whose estimates pass them."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from xsake.errors import ArgumentError
from xsake.hads.rules.cumulative import descending, remaining, remaining_of_rows
from xsake.hads.rules.rule import Ranking, Scene, Scope, always_on, visible
from xsake.hads.rules.scores import POOLED, Proxy

BINS = 64
LEAST = 1e-7  # masses below it are one bin
TILT = 1e-4  # of the logarithm, so that a flat piece of a curve keeps the order of its input

Samples = Float[np.ndarray, "Hq samples"]


class HeadCurves:
    """For every head an increasing curve: the mean of `y` at a given `x`, both in 0..1.

    Samples are collected in bins of `log x`; isotonic regression over the bins' means makes each
    curve increasing, and between bins `log y` is linear in `log x`.

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
        """Samples of the heads of a layer; without `is_sample` all are."""
        heads, log_x = len(x), _log(x)
        weights = np.ones(log_x.shape) if is_sample is None else is_sample
        place = np.floor(log_x / np.log(LEAST) * BINS).astype(int).clip(0, BINS - 1)
        place = (place + BINS * np.arange(heads)[:, None]).ravel()
        values = (weights, weights * log_x, weights * y)
        sums = np.stack([np.bincount(place, x.ravel(), heads * BINS) for x in values])
        self._sums[layer] = self._sums.get(layer, 0) + sums.reshape(3, heads, BINS)

    def finish(self) -> None:
        """Draw the curves through all samples so far."""
        self._curves = {
            layer: [_curve(*sums[:, head]) for head in range(sums.shape[1])]
            for layer, sums in self._sums.items()
        }

    def __call__(
        self, layer: int, x: Float[np.ndarray, "Hq *blocks"]
    ) -> Float[np.ndarray, "Hq *blocks"]:
        """The curves of a layer's heads at `x`, increasing even where a curve is flat."""
        if layer not in self._curves:
            raise ArgumentError(
                "this rule has not been calibrated for the layer",
                got=f"{layer=}",
                expected=f"one of {sorted(self._curves)}",
                fix="let it watch scenes of every layer, then call finish()",
            )
        log_x = _log(x)
        pairs = zip(log_x, self._curves[layer], strict=True)
        log_y = np.stack([np.interp(values, *curve) for values, curve in pairs])
        return np.exp(log_y + TILT * log_x)


@dataclasses.dataclass(frozen=True)
class EqualCoverage:
    """A cumulative rule whose thresholds are calibrated: one level is equal true coverage.

    XAttention (arXiv 2503.16428) fits a threshold per head offline, so that its estimate covers
    90% of the true mass. Here each head learns a curve from the estimated mass that remains to the
    true mass that remains, over all rows of the calibration scenes, and the priority of a block is
    the curve's value: a level `t` gives each head its own threshold, at which the true mass left
    out is `t` on average over that head's calibration rows. Sink, diagonal and previous block are
    forced and cover first.

    Args:
        name: its key in `RULES`.
        proxy: the estimate.
    """

    name: str
    proxy: Proxy
    scope: Scope = Scope.MODEL
    curves: HeadCurves = dataclasses.field(default_factory=HeadCurves, repr=False)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return self.proxy.cost(tokens, block, head_dim)

    def watch(self, scene: Scene) -> None:
        mass, first = self.proxy.mass(scene), always_on(scene.blocks)
        order = descending(mass, first=first)
        is_choice = visible(scene.blocks) & ~first
        left, truth = remaining(mass, order), remaining(scene.true_masses(), order)
        self.curves.add(scene.layer, left[:, is_choice], truth[:, is_choice])

    def finish(self) -> None:
        self.curves.finish()

    def rank(self, scene: Scene) -> Ranking:
        left = remaining_of_rows(scene, self.proxy.mass(scene))
        return Ranking.of(self.curves(scene.layer, left), forced=always_on(scene.blocks))


@dataclasses.dataclass(frozen=True)
class AdaKv:
    """The blocks of greatest mass of the whole model (Ada-KV, arXiv 2407.11550, theorem 3.3).

    Heads compete for one budget by mass, not by what it adds to the logarithm of the kept mass.
    Ada-KV sums the attention of a few last queries over a cache; a prefill has rows instead, so
    the mass of a block is its pooled estimate, passed through a curve of the head that was learnt
    as the mean true mass at a given estimate. The floor that Ada-KV leaves to each head are the
    sink, the diagonal and the previous block.
    """

    name: str = "ada_kv"
    scope: Scope = Scope.MODEL
    curves: HeadCurves = dataclasses.field(default_factory=HeadCurves, repr=False)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return POOLED.cost(tokens, block, head_dim)

    def watch(self, scene: Scene) -> None:
        is_choice = visible(scene.blocks) & ~always_on(scene.blocks)
        mass, truth = POOLED.mass(scene), scene.true_masses()
        self.curves.add(scene.layer, mass[:, is_choice], truth[:, is_choice])

    def finish(self) -> None:
        self.curves.finish()

    def rank(self, scene: Scene) -> Ranking:
        mass = self.curves(scene.layer, POOLED.mass(scene))
        return Ranking.of(mass, forced=always_on(scene.blocks))


def _log(x: Float[np.ndarray, "Hq *samples"]) -> Float[np.ndarray, "Hq *samples"]:
    return np.log(np.clip(x, LEAST, 1.0, dtype=np.float64))


def _curve(
    counts: Float[np.ndarray, " bins"],
    log_x: Float[np.ndarray, " bins"],
    y: Float[np.ndarray, " bins"],
) -> Float[np.ndarray, "2 knots"]:
    """Knots `(log x, log y)` of an increasing curve, from the sums of bins in falling order."""
    filled = np.flatnonzero(counts)[::-1]
    if not filled.size:  # no choice was ever left to this head: any increasing curve will do
        return np.array([[np.log(LEAST), 0.0], [np.log(LEAST), 0.0]])
    weights = counts[filled]
    means = _isotonic(y[filled] / weights, weights)
    return np.stack([log_x[filled] / weights, np.log(np.maximum(means, LEAST**2))])


def _isotonic(
    values: Float[np.ndarray, " knots"], weights: Float[np.ndarray, " knots"]
) -> Float[np.ndarray, " knots"]:
    """The closest non-decreasing values in weighted least squares, by pooling violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many values
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] >= value:
            mean, mass, size = pools.pop()
            value = (value * weight + mean * mass) / (weight + mass)
            weight, count = weight + mass, count + size
        pools.append((value, weight, count))
    sizes: Int[np.ndarray, " pools"] = np.array([size for _, _, size in pools])
    return np.repeat([mean for mean, _, _ in pools], sizes)
