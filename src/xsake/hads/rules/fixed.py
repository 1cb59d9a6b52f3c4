"""Patterns that look at no query: windows, first blocks, global columns and random blocks."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from xsake.hads.rules.cost import free
from xsake.hads.rules.rule import LearnsNothing, Ranking, Scene, Scope, always_on, offsets, visible


@dataclasses.dataclass(frozen=True)
class Window(LearnsNothing):
    """The nearest blocks of every row, with or without the first block.

    Without it this is a sliding window; with it StreamingLLM's pattern (arXiv 2309.17453), whose
    four sink tokens become one block. The diagonal and the block before it are forced.

    Args:
        name: its key in `RULES`.
        sinks: first blocks of a row that are forced.
    """

    name: str
    sinks: int
    scope: Scope = Scope.ROWS
    cost = staticmethod(free)

    def rank(self, scene: Scene) -> Ranking:
        forced = always_on(scene.blocks, sinks=self.sinks)
        return Ranking.of(_every_head(-offsets(scene.blocks), scene), forced=forced)


@dataclasses.dataclass(frozen=True)
class Longformer(LearnsNothing):
    """A window and global first columns (arXiv 2004.05150), both growing with the budget.

    After the forced sink, diagonal and previous block, every fourth block that a row gets is the
    next column, the others are the next nearest blocks. Global rows do not exist under causality.
    """

    name: str = "longformer"
    scope: Scope = Scope.ROWS
    cost = staticmethod(free)

    def rank(self, scene: Scene) -> Ranking:
        near = offsets(scene.blocks) - 2
        column = np.arange(scene.blocks, dtype=np.float32)[None, :] - 1
        turn = np.minimum(near + near // 3, 4 * column + 3)
        return Ranking.of(_every_head(-turn, scene), forced=always_on(scene.blocks))


@dataclasses.dataclass(frozen=True)
class BigBird(LearnsNothing):
    """A window, two global columns and random blocks (arXiv 2007.14062), other for every head.

    After the forced sink, diagonal and previous block comes the second column, then in turns the
    next nearest and a random block: the paper too has as many random blocks as window blocks.
    """

    name: str = "bigbird"
    scope: Scope = Scope.ROWS
    cost = staticmethod(free)

    def rank(self, scene: Scene) -> Ranking:
        forced = always_on(scene.blocks)
        drawn = np.where(visible(scene.blocks) & ~forced, draws(scene), np.inf)
        place = np.argsort(np.argsort(drawn, axis=-1), axis=-1)
        turn = np.minimum(2 * (offsets(scene.blocks) - 2), 2 * place + 1)
        is_second_column = np.arange(scene.blocks) == 1
        return Ranking.of(-np.where(is_second_column, -1, turn), forced=forced)


@dataclasses.dataclass(frozen=True)
class Random(LearnsNothing):
    """Random blocks of every row, other for every head.

    Args:
        name: its key in `RULES`.
        sinks, locals: first and last blocks of a row that are forced; the diagonal always is.
    """

    name: str
    sinks: int
    locals: int
    scope: Scope = Scope.ROWS
    cost = staticmethod(free)

    def rank(self, scene: Scene) -> Ranking:
        forced: Bool[np.ndarray, "Nq Nk"] = always_on(
            scene.blocks, sinks=self.sinks, locals=self.locals
        )
        return Ranking.of(draws(scene), forced=forced)


def draws(scene: Scene) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Uniform numbers that depend on nothing but the seed, the layer and the sizes of a scene."""
    random = np.random.default_rng([scene.seed, scene.layer])
    return random.random((scene.heads, scene.blocks, scene.blocks), np.float32)


def _every_head(
    priority: Float[np.ndarray, "Nq Nk"], scene: Scene
) -> Float[np.ndarray, "Hq Nq Nk"]:
    return np.broadcast_to(priority, (scene.heads, *priority.shape))
