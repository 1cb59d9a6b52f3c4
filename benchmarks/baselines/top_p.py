"""Top-k, top-p and oracle rules: rankings by estimated or true block masses."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from benchmarks.baselines.estimators import MassEstimator, zero_cost
from benchmarks.baselines.rule import LayerSample, Ranking, RuleScope, Uncalibrated, forced_grid

Masses = Float[np.ndarray, "*rows blocks"]


def descending_order(
    mass: Masses, *, first: Bool[np.ndarray, "..."]
) -> Int[np.ndarray, "*rows blocks"]:
    """Return the blocks of each row: `first` ones, then by descending mass."""
    return np.argsort(np.where(first, -2.0, -mass), axis=-1, kind="stable")


def remaining_mass(mass: Masses, order: Int[np.ndarray, "*rows blocks"]) -> Masses:
    """Return the mass of each block and of all later ones in the order.

    The smallest set of mass `p` consists of the blocks whose remaining mass exceeds `1 - p`. The
    sum runs from the end, which is exact where the covered mass rounds to one in float32.

    Example:
        >>> mass = np.array([[0.1, 0.6, 0.3]])
        >>> remaining_mass(mass, descending_order(mass, first=np.zeros((1, 3), bool))).round(2)
        array([[0.1, 1. , 0.4]])
    """
    ordered = np.take_along_axis(mass, order, axis=-1).astype(np.float64)
    tails = np.cumsum(ordered[..., ::-1], axis=-1)[..., ::-1]
    remaining = np.empty_like(tails)
    np.put_along_axis(remaining, order, tails, axis=-1)
    return remaining


def remaining_row_mass(sample: LayerSample, mass: Masses) -> Masses:
    """Return `remaining_mass` with the forced blocks of every row first."""
    return remaining_mass(mass, descending_order(mass, first=forced_grid(sample.blocks)))


@dataclasses.dataclass(frozen=True)
class TopKRule(Uncalibrated):
    """Blocks of the largest estimated mass; sink, diagonal and previous block forced.

    Args:
        name: key in `RULES`.
        estimator: of block masses.
        scope: `ROWS` for a top-k per row, `MODEL` for one over all rows.
    """

    name: str
    estimator: MassEstimator
    scope: RuleScope = RuleScope.ROWS

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return self.estimator.cost(tokens, block, head_dim)

    def rank(self, sample: LayerSample) -> Ranking:
        return Ranking.of(self.estimator.mass(sample), forced=forced_grid(sample.blocks))


@dataclasses.dataclass(frozen=True)
class TopPRule(Uncalibrated):
    """Smallest set of blocks of every row that covers a share of its estimated mass.

    The priority of a block is the estimated mass of it and all later blocks in the row's order.
    The blocks above a level `t` are those of the rule with threshold `1 - t` in every row of the
    model. Sink, diagonal and previous block are forced and come first.

    Args:
        name: key in `RULES`.
        estimator: of block masses.
    """

    name: str
    estimator: MassEstimator
    scope: RuleScope = RuleScope.MODEL

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return self.estimator.cost(tokens, block, head_dim)

    def rank(self, sample: LayerSample) -> Ranking:
        mass = self.estimator.mass(sample)
        return Ranking.of(remaining_row_mass(sample, mass), forced=forced_grid(sample.blocks))


@dataclasses.dataclass(frozen=True)
class OracleRows(Uncalibrated):
    """Blocks of the largest true mass of every row; sink, diagonal and previous block forced.

    The cost of the true masses is not counted.
    """

    name: str = "oracle_rows"
    scope: RuleScope = RuleScope.ROWS
    cost = staticmethod(zero_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        return Ranking.of(sample.true_masses(), forced=forced_grid(sample.blocks))


@dataclasses.dataclass(frozen=True)
class OracleModel(Uncalibrated):
    """Optimal choice: smallest mean of -log(kept mass) over rows at every budget.

    After the sink, the diagonal and the previous block, the blocks of a row come by descending true
    mass `M` with the gain `log(m + M) - log m`. Gains decrease along a row, so taking the largest
    of the whole model is optimal at every count.
    """

    name: str = "oracle_model"
    scope: RuleScope = RuleScope.MODEL
    cost = staticmethod(zero_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        masses, forced = sample.true_masses(), forced_grid(sample.blocks)
        left = remaining_mass(masses, descending_order(masses, first=forced))
        total = masses.sum(axis=-1, keepdims=True, dtype=np.float64)
        # The diagonal comes first and is never empty; the minimum protects forced blocks only.
        kept = np.maximum(total - left, np.finfo(np.float64).tiny)
        gain = np.where(forced, 0, np.log1p(masses / np.where(forced, 1, kept)))
        return Ranking.of(gain, forced=forced)
