"""Oracle rules: rankings by the true masses, as upper bounds of quality."""

import dataclasses

import numpy as np

from xsake.hads.rules.cost import zero_cost
from xsake.hads.rules.cumulative import descending_order, remaining_mass
from xsake.hads.rules.rule import LayerSample, Ranking, RuleScope, Uncalibrated, forced_grid


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
