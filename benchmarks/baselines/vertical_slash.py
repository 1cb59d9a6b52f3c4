"""Rules from the columns and diagonals that the last queries attend to."""

import dataclasses

import numpy as np
from jaxtyping import Float, Int

from benchmarks.baselines.estimators import (
    POOLED,
    last_attention,
    last_queries_cost,
    pooled_cost,
    zero_cost,
)
from benchmarks.baselines.rule import (
    LayerSample,
    Ranking,
    RuleScope,
    Uncalibrated,
    block_offsets,
    causal_grid,
    forced_grid,
)
from benchmarks.baselines.top_p import descending_order, remaining_mass
from xsake.errors import ArgumentError

Stripe = Float[np.ndarray, "Hq Nk"]


def stripes(attention: Float[np.ndarray, "Hq S Tk"], block: int) -> tuple[Stripe, Stripe]:
    """Return the attention mass of each column and each diagonal of blocks.

    A diagonal of tokens crosses two diagonals of blocks, which share its mass. Columns sum to one,
    and so do diagonals; diagonal 0 is the main one.

    Args:
        attention: of the last queries of a sequence.
        block: tokens of a block.
    """
    heads, queries, tokens = attention.shape
    columns = attention.mean(axis=1).reshape(heads, -1, block).sum(axis=-1)
    # By distance: the key at the query's position at 0, the previous one at 1.
    by_distance = np.zeros((heads, queries, tokens), attention.dtype)
    for row, position in enumerate(range(tokens - queries, tokens)):
        by_distance[:, row, : position + 1] = attention[:, row, position::-1]
    diagonals = by_distance.mean(axis=1).reshape(heads, -1, block)
    fraction = np.arange(block, dtype=attention.dtype) / block
    slashes, overlap = diagonals @ (1 - fraction), diagonals @ fraction
    slashes[:, 1:] += overlap[:, :-1]
    slashes[:, -1] += overlap[:, -1]
    return columns, slashes


def over_blocks(columns: Stripe, slashes: Stripe) -> Float[np.ndarray, "Hq Nq Nk"]:
    """Return the maximum of column and diagonal for every block."""
    steps = np.abs(block_offsets(columns.shape[-1])).astype(int)
    return np.maximum(columns[:, None, :], slashes[:, steps])


@dataclasses.dataclass(frozen=True)
class VerticalSlash(Uncalibrated):
    """Columns and diagonals that the last 64 queries attend to (MInference, arXiv 2407.02490).

    A block ranks by the larger share of its column and its diagonal. The paper takes whole columns
    and diagonals; here every row takes the same number of its best blocks, which keeps more mass at
    an equal total because early rows stay denser. The paper's 30 forced columns and diagonals
    become the sink, the diagonal and the previous block.
    """

    name: str = "vertical_slash"
    scope: RuleScope = RuleScope.ROWS
    queries: int = 64

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return last_queries_cost(self.queries)(tokens, block, head_dim)

    def rank(self, sample: LayerSample) -> Ranking:
        shares = stripes(last_attention(sample, self.queries), sample.block)
        return Ranking.of(over_blocks(*shares), forced=forced_grid(sample.blocks))


@dataclasses.dataclass(frozen=True)
class FlexPrefill(Uncalibrated):
    """Heads are query-aware or vertical-slash by one test per input (arXiv 2502.20766).

    The last 128 queries have exact attention. If the pooled estimate of their block masses is
    closer than `tau` to it, by the root of the Jensen-Shannon divergence, the head is query-aware:
    the smallest set of blocks of its pooled map that covers `gamma`. Otherwise the smallest sets of
    columns and of diagonals that each cover `gamma`. A level `t` is `gamma = 1 - t` for all heads.
    Columns and diagonals are those of blocks; the paper counts tokens and converts. Its minimum of
    512 tokens becomes the forced sink, diagonal and previous block.

    Args:
        tau: maximum distance of a query-aware head.
        queries: last queries with exact attention.
    """

    name: str = "flexprefill"
    scope: RuleScope = RuleScope.MODEL
    tau: float = 0.1
    queries: int = 128

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the cost of the last queries and of the pooled map."""
        exact = last_queries_cost(self.queries)(tokens, block, head_dim)
        return exact + pooled_cost(tokens, block, head_dim)

    def rank(self, sample: LayerSample) -> Ranking:
        columns, slashes = stripes(last_attention(sample, self.queries), sample.block)
        pooled = POOLED.mass(sample)
        is_aware = self.distances(sample, columns) < self.tau
        pooled_priority = (
            _remaining(pooled.reshape(sample.heads, -1)).reshape(pooled.shape) / sample.blocks
        )
        stripe_priority = over_blocks(_remaining(columns), _remaining(slashes))
        priority = np.where(is_aware[:, None, None], pooled_priority, stripe_priority)
        return Ranking.of(priority, forced=forced_grid(sample.blocks))

    def distances(self, sample: LayerSample, columns: Stripe) -> Float[np.ndarray, " Hq"]:
        """Return the root Jensen-Shannon divergence of pooled and exact masses, last queries."""
        mean = np.asarray(sample.q[-self.queries :]).mean(axis=0)
        keys = np.asarray(sample.k).reshape(sample.blocks, sample.block, *sample.k.shape[1:])
        keys = np.repeat(keys.mean(axis=1), sample.heads // sample.k.shape[1], axis=1)
        logits = sample.scale * np.einsum("hd,nhd->hn", mean, keys)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        estimate = weights / weights.sum(axis=-1, keepdims=True)
        middle = (estimate + columns) / 2
        halves = _divergence(estimate, middle) + _divergence(columns, middle)
        return np.sqrt(np.maximum(halves / 2, 0))


def _remaining(mass: Float[np.ndarray, "Hq pieces"]) -> Float[np.ndarray, "Hq pieces"]:
    """Return the remaining mass of each head before each entry, in descending order."""
    return remaining_mass(mass, descending_order(mass, first=np.zeros(mass.shape, bool)))


def _divergence(p: Stripe, q: Stripe) -> Float[np.ndarray, " Hq"]:
    """Return KL(p || q); `q` is zero only where `p` is."""
    tiny = np.finfo(np.float32).tiny
    return (p * np.log(np.maximum(p, tiny) / np.maximum(q, tiny))).sum(axis=-1)


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
        costs = {kind: last_queries_cost(self.queries) for kind in BALANCES}
        costs |= {A_SHAPE: zero_cost, BLOCKS: pooled_cost}
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
                "vertical-slash-calibration",
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
