"""Columns and diagonals that the last queries attend to, and the rules that extend them upwards."""

import dataclasses

import numpy as np
from jaxtyping import Float

from xsake.hads.rules import cost
from xsake.hads.rules.cumulative import descending, remaining
from xsake.hads.rules.rule import LearnsNothing, Ranking, Scene, Scope, always_on, offsets
from xsake.hads.rules.scores import POOLED, last_attention

Stripe = Float[np.ndarray, "Hq Nk"]


def stripes(attention: Float[np.ndarray, "Hq S Tk"], block: int) -> tuple[Stripe, Stripe]:
    """Shares of attention that fall on each column and on each diagonal of blocks.

    A diagonal of tokens crosses two diagonals of blocks; both get their part of its share. Columns
    sum to one, and so do diagonals; diagonal 0 is the main one.

    Args:
        attention: of the last queries of a sequence.
        block: tokens of a block.
    """
    heads, queries, tokens = attention.shape
    columns = attention.mean(axis=1).reshape(heads, -1, block).sum(axis=-1)
    # Reversed and shifted by its position, each query has its own key at 0, the one before at 1.
    own_first = np.zeros((heads, queries, tokens), attention.dtype)
    for row, position in enumerate(range(tokens - queries, tokens)):
        own_first[:, row, : position + 1] = attention[:, row, position::-1]
    diagonals = own_first.mean(axis=1).reshape(heads, -1, block)
    part = np.arange(block, dtype=attention.dtype) / block
    slashes, next_ones = diagonals @ (1 - part), diagonals @ part
    slashes[:, 1:] += next_ones[:, :-1]
    slashes[:, -1] += next_ones[:, -1]
    return columns, slashes


def over_blocks(columns: Stripe, slashes: Stripe) -> Float[np.ndarray, "Hq Nq Nk"]:
    """For every block the better of its column and its diagonal."""
    steps = np.abs(offsets(columns.shape[-1])).astype(int)
    return np.maximum(columns[:, None, :], slashes[:, steps])


@dataclasses.dataclass(frozen=True)
class VerticalSlash(LearnsNothing):
    """The columns and diagonals that the last 64 queries attend to (MInference, arXiv 2407.02490).

    A block ranks by the better of its column's and its diagonal's share. The paper takes whole
    columns and diagonals; here every row takes as many of its best blocks, which keeps more mass at
    an equal total because early rows stay denser. The paper's 30 forced columns and diagonals
    become the sink, the diagonal and the previous block.
    """

    name: str = "vertical_slash"
    scope: Scope = Scope.ROWS
    queries: int = 64

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        return cost.of_last_queries(self.queries)(tokens, block, head_dim)

    def rank(self, scene: Scene) -> Ranking:
        shares = stripes(last_attention(scene, self.queries), scene.block)
        return Ranking.of(over_blocks(*shares), forced=always_on(scene.blocks))


@dataclasses.dataclass(frozen=True)
class FlexPrefill(LearnsNothing):
    """Heads are query-aware or vertical-slash by one test per input (arXiv 2502.20766).

    The last 128 queries are attended exactly. If the pooled estimate of their block masses is
    closer than `tau` to the truth, by the root of the Jensen-Shannon divergence, the head is
    query-aware: the smallest set of blocks of its pooled map that covers `gamma`. Else the smallest
    sets of columns and of diagonals that each cover `gamma`. A level `t` is `gamma = 1 - t` for all
    heads. Columns and diagonals are those of blocks, where the paper counts tokens and converts;
    its minimum of 512 tokens becomes the forced sink, diagonal and previous block.

    Args:
        tau: greatest distance of a query-aware head.
        queries: how many are attended exactly.
    """

    name: str = "flexprefill"
    scope: Scope = Scope.MODEL
    tau: float = 0.1
    queries: int = 128

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """The last queries, and the pooled map even if no head turns out to need it."""
        exact = cost.of_last_queries(self.queries)(tokens, block, head_dim)
        return exact + cost.of_pooled(tokens, block, head_dim)

    def rank(self, scene: Scene) -> Ranking:
        columns, slashes = stripes(last_attention(scene, self.queries), scene.block)
        pooled = POOLED.mass(scene)
        aware = self.distances(scene, columns) < self.tau
        whole = _left(pooled.reshape(scene.heads, -1)).reshape(pooled.shape) / scene.blocks
        striped = over_blocks(_left(columns), _left(slashes))
        priority = np.where(aware[:, None, None], whole, striped)
        return Ranking.of(priority, forced=always_on(scene.blocks))

    def distances(self, scene: Scene, columns: Stripe) -> Float[np.ndarray, " Hq"]:
        """Root Jensen-Shannon divergence of the last queries' pooled estimate from the truth."""
        mean = np.asarray(scene.q[-self.queries :]).mean(axis=0)
        keys = np.asarray(scene.k).reshape(scene.blocks, scene.block, *scene.k.shape[1:])
        keys = np.repeat(keys.mean(axis=1), scene.heads // scene.k.shape[1], axis=1)
        logits = scene.scale * np.einsum("hd,nhd->hn", mean, keys)
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        estimate = weights / weights.sum(axis=-1, keepdims=True)
        middle = (estimate + columns) / 2
        halves = _divergence(estimate, middle) + _divergence(columns, middle)
        return np.sqrt(np.maximum(halves / 2, 0))


def _left(mass: Float[np.ndarray, "Hq pieces"]) -> Float[np.ndarray, "Hq pieces"]:
    """What remains of each head's mass before a piece is taken, the greatest pieces first."""
    return remaining(mass, descending(mass, first=np.zeros(mass.shape, bool)))


def _divergence(p: Stripe, q: Stripe) -> Float[np.ndarray, " Hq"]:
    """KL(p || q), where `q` is nowhere zero unless `p` is."""
    tiny = np.finfo(np.float32).tiny
    return (p * np.log(np.maximum(p, tiny) / np.maximum(q, tiny))).sum(axis=-1)
