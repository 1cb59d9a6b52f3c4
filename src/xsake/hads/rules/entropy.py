"""The original HADS: budgets of heads by their entropy, blocks by chance."""

import dataclasses

import numpy as np
from jaxtyping import Float

from xsake.errors import ArgumentError
from xsake.hads.rules.cost import free
from xsake.hads.rules.fixed import draws
from xsake.hads.rules.rule import Ranking, Scene, Scope, always_on

LOW, HIGH = 0.1, 0.9


@dataclasses.dataclass(frozen=True)
class EntropyShares:
    """Heads keep a share of their blocks that grows with their entropy, from 0.1 to 0.9.

    `share = 0.1 + 0.8 (H - min H) / (max H - min H)` over all heads of the model, with the mean
    entropy `H` of a head's attention on calibration documents: the most focused head skips 90%, the
    broadest 10%. The blocks up to two before the diagonal are forced, no sink is, and random blocks
    fill the share, which is rescaled to the budget.

    Args:
        name: its key in `RULES`.
        from_first_layer: literal reading: the profile of layer 0, with its own least and greatest
            entropy, serves all layers.
    """

    name: str = "entropy_original"
    from_first_layer: bool = False
    scope: Scope = Scope.HEADS
    sums: dict[int, Float[np.ndarray, " Hq"]] = dataclasses.field(default_factory=dict, repr=False)
    counts: dict[int, int] = dataclasses.field(default_factory=dict, repr=False)
    cost = staticmethod(free)

    def watch(self, scene: Scene) -> None:
        if scene.entropy is None:
            raise ArgumentError(
                "this rule learns from the entropy of heads",
                got="entropy=None",
                fix="give entropy to the scenes that it watches",
            )
        entropy = np.asarray(scene.entropy, np.float64)
        self.sums[scene.layer] = self.sums.get(scene.layer, 0) + entropy
        self.counts[scene.layer] = self.counts.get(scene.layer, 0) + 1

    def finish(self) -> None:
        """Nothing is left to do: shares are computed when they are asked for."""

    def rank(self, scene: Scene) -> Ranking:
        forced = always_on(scene.blocks, sinks=0, locals=3)
        return Ranking.of(draws(scene), forced=forced)

    def shares(self, layer: int) -> Float[np.ndarray, " Hq"]:
        layer = 0 if self.from_first_layer else layer
        means = {seen: total / self.counts[seen] for seen, total in self.sums.items()}
        if layer not in means:
            raise ArgumentError(
                "this rule has not been calibrated for the layer",
                got=f"{layer=}",
                expected=f"one of {sorted(means)}",
                fix="let it watch scenes of every layer",
            )
        ends = means[layer] if self.from_first_layer else np.concatenate(list(means.values()))
        span = max(ends.max() - ends.min(), np.finfo(np.float64).tiny)
        return LOW + (HIGH - LOW) * (means[layer] - ends.min()) / span
