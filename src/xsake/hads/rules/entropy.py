"""The original HADS: budgets of heads by entropy, random blocks."""

import dataclasses

import numpy as np
from jaxtyping import Float

from xsake.errors import ArgumentError
from xsake.hads.rules.cost import zero_cost
from xsake.hads.rules.fixed import random_priorities
from xsake.hads.rules.rule import LayerSample, Ranking, RuleScope, forced_grid

LOW, HIGH = 0.1, 0.9


@dataclasses.dataclass(frozen=True)
class EntropyShares:
    """Share of blocks of each head by its entropy, from 0.1 to 0.9; random blocks.

    `share = 0.1 + 0.8 (H - min H) / (max H - min H)` over all heads of the model, with the mean
    attention entropy `H` of a head on calibration documents. The diagonal and two blocks before it
    are forced, no sink is; random blocks fill the share, which is rescaled to the budget.

    Args:
        name: key in `RULES`.
        from_first_layer: literal reading of the original: the entropies of layer 0, with their own
            minimum and maximum, are used for all layers.
    """

    name: str = "entropy_original"
    from_first_layer: bool = False
    scope: RuleScope = RuleScope.HEADS
    sums: dict[int, Float[np.ndarray, " Hq"]] = dataclasses.field(default_factory=dict, repr=False)
    counts: dict[int, int] = dataclasses.field(default_factory=dict, repr=False)
    cost = staticmethod(zero_cost)

    def observe(self, sample: LayerSample) -> None:
        if sample.entropy is None:
            raise ArgumentError(
                "this rule requires the entropy of heads",
                got="entropy=None",
                fix="pass entropy for calibration",
            )
        entropy = np.asarray(sample.entropy, np.float64)
        self.sums[sample.layer] = self.sums.get(sample.layer, 0) + entropy
        self.counts[sample.layer] = self.counts.get(sample.layer, 0) + 1

    def finish(self) -> None:
        """Do nothing: shares are computed on demand."""

    def rank(self, sample: LayerSample) -> Ranking:
        forced = forced_grid(sample.blocks, num_sink=0, num_local=3)
        return Ranking.of(random_priorities(sample), forced=forced)

    def shares(self, layer: int) -> Float[np.ndarray, " Hq"]:
        layer = 0 if self.from_first_layer else layer
        means = {number: total / self.counts[number] for number, total in self.sums.items()}
        if layer not in means:
            raise ArgumentError(
                "the rule is not calibrated for this layer",
                got=f"{layer=}",
                expected=f"one of {sorted(means)}",
                fix="call observe() with samples of every layer",
            )
        ends = means[layer] if self.from_first_layer else np.concatenate(list(means.values()))
        span = max(ends.max() - ends.min(), np.finfo(np.float64).tiny)
        return LOW + (HIGH - LOW) * (means[layer] - ends.min()) / span
