"""Input-independent rules: windows, sinks, global columns, random blocks, shares by entropy."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float

from benchmarks.baselines.estimators import zero_cost
from benchmarks.baselines.rule import (
    LayerSample,
    Ranking,
    RuleScope,
    Uncalibrated,
    block_offsets,
    causal_grid,
    forced_grid,
)
from xsake.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class WindowRule(Uncalibrated):
    """Nearest blocks of every row: a sliding window, with sink blocks optional.

    With a sink block it is StreamingLLM's pattern (arXiv 2309.17453), whose four sink tokens become
    one block. The diagonal and the previous block are forced.

    Args:
        name: key in `RULES`.
        num_sink: first blocks of a row that are forced.
    """

    name: str
    num_sink: int
    scope: RuleScope = RuleScope.ROWS
    cost = staticmethod(zero_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        forced = forced_grid(sample.blocks, num_sink=self.num_sink)
        return Ranking.of(_broadcast_heads(-block_offsets(sample.blocks), sample), forced=forced)


@dataclasses.dataclass(frozen=True)
class LongformerRule(Uncalibrated):
    """A window and global first columns (arXiv 2004.05150), both growing with the budget.

    After the forced sink, diagonal and previous block, every fourth block of a row is the next
    column, the others are the next nearest blocks. Causal attention has no global rows.
    """

    name: str = "longformer"
    scope: RuleScope = RuleScope.ROWS
    cost = staticmethod(zero_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        near = block_offsets(sample.blocks) - 2
        column = np.arange(sample.blocks, dtype=np.float32)[None, :] - 1
        order = np.minimum(near + near // 3, 4 * column + 3)
        return Ranking.of(_broadcast_heads(-order, sample), forced=forced_grid(sample.blocks))


@dataclasses.dataclass(frozen=True)
class BigBirdRule(Uncalibrated):
    """A window, two global columns and random blocks per head (arXiv 2007.14062).

    After the forced sink, diagonal and previous block comes the second column, then alternately the
    next nearest and a random block; the paper also has equal numbers of both.
    """

    name: str = "bigbird"
    scope: RuleScope = RuleScope.ROWS
    cost = staticmethod(zero_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        forced = forced_grid(sample.blocks)
        priority = np.where(causal_grid(sample.blocks) & ~forced, random_priorities(sample), np.inf)
        rank = np.argsort(np.argsort(priority, axis=-1), axis=-1)
        order = np.minimum(2 * (block_offsets(sample.blocks) - 2), 2 * rank + 1)
        is_second_column = np.arange(sample.blocks) == 1
        return Ranking.of(-np.where(is_second_column, -1, order), forced=forced)


@dataclasses.dataclass(frozen=True)
class RandomRule(Uncalibrated):
    """Random blocks of every row, different for every head.

    Args:
        name: key in `RULES`.
        num_sink, num_local: first and last blocks of a row that are forced.
    """

    name: str
    num_sink: int
    num_local: int
    scope: RuleScope = RuleScope.ROWS
    cost = staticmethod(zero_cost)

    def rank(self, sample: LayerSample) -> Ranking:
        forced: Bool[np.ndarray, "Nq Nk"] = forced_grid(
            sample.blocks, num_sink=self.num_sink, num_local=self.num_local
        )
        return Ranking.of(random_priorities(sample), forced=forced)


def random_priorities(sample: LayerSample) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Return uniform random numbers, determined by seed, layer and sizes of a sample."""
    rng = np.random.default_rng([sample.seed, sample.layer])
    return rng.random((sample.heads, sample.blocks, sample.blocks), np.float32)


def _broadcast_heads(
    priority: Float[np.ndarray, "Nq Nk"], sample: LayerSample
) -> Float[np.ndarray, "Hq Nq Nk"]:
    return np.broadcast_to(priority, (sample.heads, *priority.shape))


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
                "rule-entropy",
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
                "static-calibration",
                "the rule is not calibrated for this layer",
                got=f"{layer=}",
                expected=f"one of {sorted(means)}",
                fix="call observe() with samples of every layer",
            )
        ends = means[layer] if self.from_first_layer else np.concatenate(list(means.values()))
        span = max(ends.max() - ends.min(), np.finfo(np.float64).tiny)
        return LOW + (HIGH - LOW) * (means[layer] - ends.min()) / span
