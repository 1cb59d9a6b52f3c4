"""What no rule can know: orders by the true masses of the scene itself, for bounds only."""

import dataclasses

import numpy as np

from xsake.hads.rules.cost import free
from xsake.hads.rules.cumulative import descending, remaining
from xsake.hads.rules.rule import LearnsNothing, Ranking, Scene, Scope, always_on


@dataclasses.dataclass(frozen=True)
class OracleRows(LearnsNothing):
    """The blocks of greatest true mass of every row; sink, diagonal and previous forced.

    An oracle is told, not computed, so it costs nothing.
    """

    name: str = "oracle_rows"
    scope: Scope = Scope.ROWS
    cost = staticmethod(free)

    def rank(self, scene: Scene) -> Ranking:
        return Ranking.of(scene.true_masses(), forced=always_on(scene.blocks))


@dataclasses.dataclass(frozen=True)
class OracleModel(LearnsNothing):
    """The best choice there is: least mean of -log(kept mass) over rows, whatever the budget.

    On top of the sink, the diagonal and the previous block, the blocks of a row come by falling
    true mass `M`, each with what it adds to the logarithm, `log(m + M) - log m`. These gains fall
    along a row, so taking the greatest of the whole model is optimal at every count.
    """

    name: str = "oracle_model"
    scope: Scope = Scope.MODEL
    cost = staticmethod(free)

    def rank(self, scene: Scene) -> Ranking:
        masses, always = scene.true_masses(), always_on(scene.blocks)
        left = remaining(masses, descending(masses, first=always))
        total = masses.sum(axis=-1, keepdims=True, dtype=np.float64)
        # The diagonal comes first and is never empty; the least float only guards what is forced.
        kept = np.maximum(total - left, np.finfo(np.float64).tiny)
        gain = np.where(always, 0, np.log1p(masses / np.where(always, 1, kept)))
        return Ranking.of(gain, forced=always)
