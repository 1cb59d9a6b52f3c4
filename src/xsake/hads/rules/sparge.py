"""SpargeAttn's block map: pooled masses of blocks that are similar to their mean."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from xsake.hads.rules.calibrated import HeadCurves
from xsake.hads.rules.cost import pooled_cost
from xsake.hads.rules.cumulative import descending_order, remaining_mass
from xsake.hads.rules.rule import LayerSample, Ranking, RuleScope, causal_grid, forced_grid
from xsake.hads.rules.scores import pooled_mass, self_similarity

Plane = Float[np.ndarray, "Hq Nq Nk"]
Cells = Bool[np.ndarray, "Hq Nq Nk"]


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


def gate_masses(sample: LayerSample, pooled: Plane, theta: float) -> tuple[Cells, Plane]:
    """Return the dissimilar blocks, and the pooled masses of similar keys, normalised to one.

    A row without similar keys has mass 0.
    """
    group = sample.heads // sample.k.shape[1]
    is_dissimilar_row = self_similarity(sample.q, sample.block) < theta
    is_dissimilar_key = np.repeat(self_similarity(sample.k, sample.block) < theta, group, axis=0)
    mass = np.where(is_dissimilar_key[:, None, :], 0, pooled)
    total = mass.sum(axis=-1, keepdims=True)
    mass = mass / np.where(total > 0, total, 1)
    return is_dissimilar_row[:, :, None] | is_dissimilar_key[:, None, :], mass
