"""MoBA: every query gates blocks; a row takes the blocks with the most votes."""

import dataclasses

import numpy as np
from jaxtyping import Float

from benchmarks.baselines.estimators import gate_cost, gate_scores, pooled_mass
from benchmarks.baselines.rule import LayerSample, Ranking, RuleScope, Uncalibrated, forced_grid


@dataclasses.dataclass(frozen=True)
class Moba(Uncalibrated):
    """Votes of queries for the blocks with the largest query . mean key (arXiv 2502.13189).

    In MoBA each query has its own blocks; a row of a block layout has one list. Each query votes
    for its best `share` of the visible blocks, 3 of 16 as in the paper's 8k runs, and blocks are
    ranked by votes, then by the mean of the gates. The diagonal is forced as in the paper; sink
    and previous block are forced in addition because the gate is untrained.

    Args:
        share: of the visible blocks that a query votes for, rounded up.
    """

    name: str = "moba"
    scope: RuleScope = RuleScope.ROWS
    share: float = 3 / 16
    cost = staticmethod(gate_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        priority = votes(gate_scores(sample), self.share) + pooled_mass(sample) / 2
        return Ranking.of(priority, forced=forced_grid(sample.blocks))


def votes(gates: Float[np.ndarray, "Hq Nq B Nk"], share: float) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Count the queries of a row that have a block among their best `share` of visible blocks.

    Example:
        >>> gates = np.zeros((1, 3, 2, 3), np.float32)
        >>> gates[0, 2] = [[1, 2, 3], [1, 3, 2]]
        >>> votes(gates, 2 / 3)[0, 2]
        array([0., 2., 2.], dtype=float32)
    """
    counts = np.zeros((*gates.shape[:2], gates.shape[3]), np.float32)
    for row in range(gates.shape[1]):
        visible = gates[:, row, :, : row + 1]
        index = row + 1 - int(np.ceil(share * (row + 1)))
        threshold = np.partition(visible, index, axis=-1)[..., index, None]
        counts[:, row, : row + 1] = np.count_nonzero(visible >= threshold, axis=1)
    return counts
