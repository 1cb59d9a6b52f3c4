"""MInference: every head uses the pattern with the highest recall in calibration."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from xsake.errors import ArgumentError
from xsake.hads.rules import cost
from xsake.hads.rules.rule import (
    LayerSample,
    Ranking,
    RuleScope,
    block_offsets,
    causal_grid,
    forced_grid,
)
from xsake.hads.rules.scores import POOLED, last_attention
from xsake.hads.rules.vertical_slash import over_blocks, stripes

A_SHAPE, BLOCKS = "a_shape", "blocks"
BALANCES = {"slashes": 0.25, "vertical_slash": 1.0, "columns": 4.0}
PATTERNS = (A_SHAPE, *BALANCES, BLOCKS)

Plane = Float[np.ndarray, "Hq Nq Nk"]


@dataclasses.dataclass(frozen=True)
class Minference:
    """One of five patterns per head, chosen offline (MInference, arXiv 2407.02490).

    `a_shape`: the sink and a window. `slashes`, `vertical_slash`, `columns`: stripes of the last
    64 queries, with the shares of columns weighted by 1/4, 1 or 4; the paper searches over numbers
    of columns and diagonals. `blocks`: the pooled estimate. A head gets the pattern with the
    highest recall of true mass at `budget` over the calibration samples. Totals per head and counts
    per row are equal, as in `VerticalSlash`. Sink, diagonal and previous block are forced.

    Args:
        budget: share of visible blocks at which patterns are compared.
        queries: last queries with exact attention.
    """

    name: str = "minference"
    scope: RuleScope = RuleScope.ROWS
    budget: float = 0.25
    queries: int = 64
    recalls: dict[int, Float[np.ndarray, "kinds Hq"]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    kinds: dict[int, Int[np.ndarray, " Hq"]] = dataclasses.field(default_factory=dict, repr=False)

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the mean cost of the patterns of all heads."""
        self._require_calibration()
        costs = {kind: cost.last_queries_cost(self.queries) for kind in BALANCES}
        costs |= {A_SHAPE: cost.zero_cost, BLOCKS: cost.pooled_cost}
        chosen = np.concatenate(list(self.kinds.values()))
        return float(np.mean([costs[PATTERNS[kind]](tokens, block, head_dim) for kind in chosen]))

    def observe(self, sample: LayerSample) -> None:
        truth = sample.true_masses()
        recalls = np.stack([recall(plane, truth, self.budget) for plane in self._patterns(sample)])
        self.recalls[sample.layer] = self.recalls.get(sample.layer, 0) + recalls

    def finish(self) -> None:
        self.kinds.update({layer: sums.argmax(axis=0) for layer, sums in self.recalls.items()})

    def rank(self, sample: LayerSample) -> Ranking:
        self._require_calibration(sample.layer)
        patterns = np.stack(self._patterns(sample))
        chosen = patterns[self.kinds[sample.layer], np.arange(sample.heads)]
        return Ranking.of(chosen, forced=forced_grid(sample.blocks))

    def _patterns(self, sample: LayerSample) -> list[Plane]:
        """Return the priorities of all patterns."""
        columns, slashes = stripes(last_attention(sample, self.queries), sample.block)
        window = np.broadcast_to(
            -block_offsets(sample.blocks), (sample.heads, sample.blocks, sample.blocks)
        )
        stripe_priorities = [
            over_blocks(balance * columns, slashes) for balance in BALANCES.values()
        ]
        return [window, *stripe_priorities, POOLED.mass(sample)]

    def _require_calibration(self, layer: int | None = None) -> None:
        if not self.kinds or (layer is not None and layer not in self.kinds):
            raise ArgumentError(
                "the rule is not calibrated for this layer",
                got=f"{layer=}, calibrated {sorted(self.kinds)}",
                fix="call observe() with samples of every layer, then finish()",
            )


def recall(priority: Plane, truth: Plane, budget: float) -> Float[np.ndarray, " Hq"]:
    """Return the mean true mass of the best blocks of a row, equal counts per row."""
    blocks = truth.shape[-1]
    visible = causal_grid(blocks)
    totals = np.minimum(visible.sum(axis=-1)[None, :], np.arange(1, blocks + 1)[:, None]).sum(
        axis=-1
    )
    count = 1 + int(np.searchsorted(totals, budget * visible.sum()))
    ranking = Ranking.of(priority, forced=forced_grid(blocks))
    best = np.argsort(-ranking.priority, axis=-1, kind="stable")[..., :count]
    return np.take_along_axis(truth, best, axis=-1).sum(axis=-1).mean(axis=-1)
