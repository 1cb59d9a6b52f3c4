"""MoBA: every token gates blocks for itself, and the row takes those that most tokens voted for."""

import dataclasses

import numpy as np
from jaxtyping import Float

from xsake.hads.rules.cost import of_gates
from xsake.hads.rules.rule import LearnsNothing, Ranking, Scene, Scope, always_on
from xsake.hads.rules.scores import gate_scores, pooled_mass


@dataclasses.dataclass(frozen=True)
class Moba(LearnsNothing):
    """Votes of tokens for the blocks with the greatest query . mean key (arXiv 2502.13189).

    MoBA lets each token attend to its own best blocks; a row of a block layout has one list. Each
    token votes for its best `share` of the visible blocks, 3 of 16 as in the paper's 8k runs, and
    blocks rank by votes. Equal votes are decided by the mean of the gates. The untrained gate gets
    the forced sink and previous block that the paper does not have; the diagonal it does.

    Args:
        share: of the visible blocks that a token votes for, rounded up.
    """

    name: str = "moba"
    scope: Scope = Scope.ROWS
    share: float = 3 / 16
    cost = staticmethod(of_gates)

    def rank(self, scene: Scene) -> Ranking:
        priority = votes(gate_scores(scene), self.share) + pooled_mass(scene) / 2
        return Ranking.of(priority, forced=always_on(scene.blocks))


def votes(gates: Float[np.ndarray, "Hq Nq B Nk"], share: float) -> Float[np.ndarray, "Hq Nq Nk"]:
    """How many tokens of a row have a block among their best `share` of the visible blocks.

    Example:
        >>> gates = np.zeros((1, 3, 2, 3), np.float32)
        >>> gates[0, 2] = [[1, 2, 3], [1, 3, 2]]
        >>> votes(gates, 2 / 3)[0, 2]
        array([0., 2., 2.], dtype=float32)
    """
    found = np.zeros((*gates.shape[:2], gates.shape[3]), np.float32)
    for row in range(gates.shape[1]):
        seen = gates[:, row, :, : row + 1]
        place = row + 1 - int(np.ceil(share * (row + 1)))
        least = np.partition(seen, place, axis=-1)[..., place, None]
        found[:, row, : row + 1] = np.count_nonzero(seen >= least, axis=1)
    return found
