"""MInference: every head keeps the pattern that recalled most of its mass in calibration."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from xsake.errors import ArgumentError
from xsake.hads.rules import cost
from xsake.hads.rules.rule import Ranking, Scene, Scope, always_on, offsets, visible
from xsake.hads.rules.scores import POOLED, last_attention
from xsake.hads.rules.vertical_slash import over_blocks, stripes

A_SHAPE, BLOCKS = "a_shape", "blocks"
BALANCES = {"slashes": 0.25, "vertical_slash": 1.0, "columns": 4.0}
KINDS = (A_SHAPE, *BALANCES, BLOCKS)

Plane = Float[np.ndarray, "Hq Nq Nk"]


@dataclasses.dataclass(frozen=True)
class Minference:
    """Each head has one of five patterns, fixed offline (MInference, arXiv 2407.02490).

    `a_shape`: the sink and a window. `slashes`, `vertical_slash`, `columns`: stripes of the last
    64 queries, with the columns' shares weighted by 1/4, 1 or 4, where the paper searches over
    numbers of columns and diagonals. `blocks`: the pooled estimate. A head gets the pattern that
    recalls most true mass at `budget` over the calibration scenes. Every head has the same total
    and rows are alike, as in `VerticalSlash`. Sink, diagonal and previous block are forced.

    Args:
        budget: share of visible blocks at which patterns are compared.
        queries: how many are attended exactly.
    """

    name: str = "minference"
    scope: Scope = Scope.ROWS
    budget: float = 0.25
    queries: int = 64
    recalls: dict[int, Float[np.ndarray, "kinds Hq"]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    kinds: dict[int, Int[np.ndarray, " Hq"]] = dataclasses.field(default_factory=dict, repr=False)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Mean over the heads of what their patterns need."""
        self._check_finished()
        need = {kind: cost.of_last_queries(self.queries) for kind in BALANCES}
        need |= {A_SHAPE: cost.free, BLOCKS: cost.of_pooled}
        chosen = np.concatenate(list(self.kinds.values()))
        return float(np.mean([need[KINDS[kind]](tokens, block, head_dim) for kind in chosen]))

    def watch(self, scene: Scene) -> None:
        truth = scene.true_masses()
        found = np.stack([recall(plane, truth, self.budget) for plane in self._patterns(scene)])
        self.recalls[scene.layer] = self.recalls.get(scene.layer, 0) + found

    def finish(self) -> None:
        self.kinds.update({layer: found.argmax(axis=0) for layer, found in self.recalls.items()})

    def rank(self, scene: Scene) -> Ranking:
        self._check_finished(scene.layer)
        patterns = np.stack(self._patterns(scene))
        chosen = patterns[self.kinds[scene.layer], np.arange(scene.heads)]
        return Ranking.of(chosen, forced=always_on(scene.blocks))

    def _patterns(self, scene: Scene) -> list[Plane]:
        """The priorities of all kinds."""
        columns, slashes = stripes(last_attention(scene, self.queries), scene.block)
        window = np.broadcast_to(-offsets(scene.blocks), (scene.heads, scene.blocks, scene.blocks))
        striped = [over_blocks(balance * columns, slashes) for balance in BALANCES.values()]
        return [window, *striped, POOLED.mass(scene)]

    def _check_finished(self, layer: int | None = None) -> None:
        if not self.kinds or (layer is not None and layer not in self.kinds):
            raise ArgumentError(
                "patterns have not been chosen for this layer",
                got=f"{layer=}, chosen for {sorted(self.kinds)}",
                fix="let the rule watch scenes of every layer, then call finish()",
            )


def recall(priority: Plane, truth: Plane, budget: float) -> Float[np.ndarray, " Hq"]:
    """Mean true mass of a row's best blocks, as many in every row as fill the budget."""
    blocks = truth.shape[-1]
    seen = visible(blocks)
    totals = np.minimum(seen.sum(axis=-1)[None, :], np.arange(1, blocks + 1)[:, None]).sum(axis=-1)
    count = 1 + int(np.searchsorted(totals, budget * seen.sum()))
    ranking = Ranking.of(priority, forced=always_on(blocks))
    best = np.argsort(-ranking.priority, axis=-1, kind="stable")[..., :count]
    return np.take_along_axis(truth, best, axis=-1).sum(axis=-1).mean(axis=-1)
