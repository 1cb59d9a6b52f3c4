"""Rules from the columns and diagonals that the last queries attend to."""

import dataclasses

import numpy as np
from jaxtyping import Float

from xsake.hads.rules import cost
from xsake.hads.rules.cumulative import descending_order, remaining_mass
from xsake.hads.rules.rule import (
    LayerSample,
    Ranking,
    RuleScope,
    Uncalibrated,
    block_offsets,
    forced_grid,
)
from xsake.hads.rules.scores import POOLED, last_attention

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
        return cost.last_queries_cost(self.queries)(tokens, block, head_dim)

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
        exact = cost.last_queries_cost(self.queries)(tokens, block, head_dim)
        return exact + cost.pooled_cost(tokens, block, head_dim)

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
