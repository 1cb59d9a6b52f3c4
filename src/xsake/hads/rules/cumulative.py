"""Rules made of a mass estimate alone: the best blocks of a row, or all up to a cumulative mass."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from xsake.hads.rules.rule import LearnsNothing, Ranking, Scene, Scope, always_on
from xsake.hads.rules.scores import Proxy

Masses = Float[np.ndarray, "*rows blocks"]


def descending(mass: Masses, *, first: Bool[np.ndarray, "..."]) -> Int[np.ndarray, "*rows blocks"]:
    """The order in which cumulative rules take the blocks of rows: `first` ones, then by mass."""
    return np.argsort(np.where(first, -2.0, -mass), axis=-1, kind="stable")


def remaining(mass: Masses, order: Int[np.ndarray, "*rows blocks"]) -> Masses:
    """Mass of each block and of all that come after it in the order.

    A rule that keeps the smallest set of mass `p` keeps the blocks before which less than `p` is
    covered: those of which more than `1 - p` remains. Summed from the end, this is exact where
    the covered mass is so close to one that float32 cannot tell.

    Example:
        >>> mass = np.array([[0.1, 0.6, 0.3]])
        >>> remaining(mass, descending(mass, first=np.zeros((1, 3), bool))).round(2)
        array([[0.1, 1. , 0.4]])
    """
    taken = np.take_along_axis(mass, order, axis=-1).astype(np.float64)
    tails = np.cumsum(taken[..., ::-1], axis=-1)[..., ::-1]
    found = np.empty_like(tails)
    np.put_along_axis(found, order, tails, axis=-1)
    return found


def remaining_of_rows(scene: Scene, mass: Masses) -> Masses:
    """`remaining` with the always-on blocks of every row taken first."""
    return remaining(mass, descending(mass, first=always_on(scene.blocks)))


@dataclasses.dataclass(frozen=True)
class TopK(LearnsNothing):
    """The blocks of greatest estimated mass; sink, diagonal and previous block forced.

    Args:
        name: its key in `RULES`.
        proxy: the estimate.
        scope: `ROWS` for a top-k of every row, `MODEL` for one of all rows together.
    """

    name: str
    proxy: Proxy
    scope: Scope = Scope.ROWS

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return self.proxy.cost(tokens, block, head_dim)

    def rank(self, scene: Scene) -> Ranking:
        return Ranking.of(self.proxy.mass(scene), forced=always_on(scene.blocks))


@dataclasses.dataclass(frozen=True)
class TopP(LearnsNothing):
    """The smallest set of blocks of every row that covers a share of its estimated mass.

    The priority of a block is the estimated mass that remains without it and all after it in
    the row's order. All blocks above a level `t` are exactly the rule with threshold `1 - t`, in
    every row of the model. Sink, diagonal and previous block are forced and cover first.

    Args:
        name: its key in `RULES`.
        proxy: the estimate.
    """

    name: str
    proxy: Proxy
    scope: Scope = Scope.MODEL

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return self.proxy.cost(tokens, block, head_dim)

    def rank(self, scene: Scene) -> Ranking:
        mass = self.proxy.mass(scene)
        return Ranking.of(remaining_of_rows(scene, mass), forced=always_on(scene.blocks))
