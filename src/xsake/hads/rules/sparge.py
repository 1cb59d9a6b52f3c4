"""SpargeAttn's block map: pooled masses that count only where a block resembles its own mean."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from xsake.hads.rules.calibrated import HeadCurves
from xsake.hads.rules.cost import of_pooled
from xsake.hads.rules.cumulative import descending, remaining
from xsake.hads.rules.rule import Ranking, Scene, Scope, always_on, visible
from xsake.hads.rules.scores import pooled_mass, self_similarity

Plane = Float[np.ndarray, "Hq Nq Nk"]
Cells = Bool[np.ndarray, "Hq Nq Nk"]


@dataclasses.dataclass(frozen=True)
class Sparge:
    """A cumulative pooled rule that computes what it cannot pool (SpargeAttn, arXiv 2502.18137).

    A block of queries or keys is unlike itself if the mean cosine over its pairs is below `theta`.
    Its row or column of blocks is taken before all others of the model, unlike keys are left out of
    the softmax over pooled scores, and the rest is taken until a share of that softmax is covered.
    The paper tunes this share per head for an error on calibration inputs; here a level is equal
    true coverage, by curves of heads as in `EqualCoverage`. Where a budget cannot hold all unlike
    blocks, they compete by pooled mass. The second stage of SpargeAttn skips products inside its
    kernel and is no choice of blocks. Sink, diagonal and previous block are forced.

    Args:
        theta: least mean cosine of a block that may be pooled; 0.1 is the default of the authors'
            code. Larger values make whole heads dense before any other head gets a block.
    """

    name: str = "sparge"
    scope: Scope = Scope.MODEL
    theta: float = 0.1
    curves: HeadCurves = dataclasses.field(default_factory=HeadCurves, repr=False)
    cost = staticmethod(of_pooled)

    def watch(self, scene: Scene) -> None:
        always = always_on(scene.blocks)
        unlike, mass = gated(scene, pooled_mass(scene), self.theta)
        order = descending(mass, first=unlike | always)
        left, truth = remaining(mass, order), remaining(scene.true_masses(), order)
        is_choice = visible(scene.blocks) & ~always & ~unlike
        flat = (x.reshape(scene.heads, -1) for x in (left, truth, is_choice))
        self.curves.add(scene.layer, *flat)

    def finish(self) -> None:
        self.curves.finish()

    def rank(self, scene: Scene) -> Ranking:
        always, pooled = always_on(scene.blocks), pooled_mass(scene)
        unlike, mass = gated(scene, pooled, self.theta)
        left = remaining(mass, descending(mass, first=unlike | always))
        priority = np.where(unlike, 1 + pooled, self.curves(scene.layer, left))
        return Ranking.of(priority, forced=always)


def gated(scene: Scene, pooled: Plane, theta: float) -> tuple[Cells, Plane]:
    """Blocks that cannot be pooled, and the pooled masses of the keys that can, made to sum to one.

    A row without such keys keeps no mass.
    """
    group = scene.heads // scene.k.shape[1]
    is_unlike_row = self_similarity(scene.q, scene.block) < theta
    is_unlike_key = np.repeat(self_similarity(scene.k, scene.block) < theta, group, axis=0)
    mass = np.where(is_unlike_key[:, None, :], 0, pooled)
    total = mass.sum(axis=-1, keepdims=True)
    mass = mass / np.where(total > 0, total, 1)
    return is_unlike_row[:, :, None] | is_unlike_key[:, None, :], mass
