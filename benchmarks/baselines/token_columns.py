"""MInference's patterns with token columns: single keys for all queries of a row of blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from benchmarks.baselines.estimators import (
    POOLED,
    last_attention,
    last_queries_cost,
    pooled_cost,
    zero_cost,
)
from benchmarks.baselines.rule import (
    LayerSample,
    RuleScope,
    block_offsets,
    causal_grid,
    forced_grid,
    take_rows,
)
from benchmarks.baselines.vertical_slash import stripes
from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks, level_totals, row_counts

WINDOW, BLOCKS = "window", "blocks"
# Share of the blocks that are not forced which single columns get; the others are diagonals.
SPLITS = {"slashes": 0.0, "1/4": 0.25, "1/2": 0.5, "3/4": 0.75, "columns": 1.0}
PATTERNS = (WINDOW, *SPLITS, BLOCKS)
FORCED = ForcedBlocks()


@dataclasses.dataclass(frozen=True)
class TokenChoice:
    """Pairs that one layer computes.

    Args:
        blocks: computed blocks.
        columns: single keys of each row of blocks, all before it; -1 is padding.
    """

    blocks: Bool[np.ndarray, "Hq Nq Nk"]
    columns: Int[np.ndarray, "Hq Nq C"]


@dataclasses.dataclass(frozen=True)
class TokenColumns:
    """One of seven patterns per head, chosen offline (MInference, arXiv 2407.02490).

    As its kernel, a head computes diagonals of blocks and single columns, both ranked by the exact
    attention of the last 64 queries. Heads differ in the share of columns; the paper searches over
    pairs of numbers. `window` and `blocks` are its other two patterns. A head gets the pattern with
    the highest recall of true mass at `budget` over the calibration samples. Every row takes the
    same number of pairs; the paper takes whole columns and diagonals, so that early rows, which see
    few of them, compute less. Sink, diagonal and previous block are forced.

    Args:
        budget: share of visible pairs at which patterns are compared.
        queries: last queries with exact attention.
    """

    name: str = "minference_tokens"
    scope: RuleScope = RuleScope.ROWS
    budget: float = 0.25
    queries: int = 64
    recalls: dict[int, Float[np.ndarray, "patterns Hq"]] = dataclasses.field(
        default_factory=dict, repr=False
    )
    patterns: dict[int, Int[np.ndarray, " Hq"]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    def cost(self, tokens: int, block: int, head_dim: int) -> float:
        """Return the mean selection cost of the patterns of all heads."""
        self._require_calibration()
        costs = dict.fromkeys(SPLITS, last_queries_cost(self.queries))
        costs |= {WINDOW: zero_cost, BLOCKS: pooled_cost}
        chosen = np.concatenate(list(self.patterns.values()))
        return float(np.mean([costs[PATTERNS[x]](tokens, block, head_dim) for x in chosen]))

    def observe(self, sample: LayerSample) -> None:
        """Add the recall of every pattern in one layer of a document."""
        masses = np.asarray(_row_masses(sample.q, sample.k, sample.scale, block=sample.block))
        levels = level_totals(np.arange(sample.blocks + 1), sample.blocks, FORCED)
        total = round(self.budget * int(causal_grid(sample.blocks).sum()))
        total = max(total, int(levels[0]))
        counts = row_counts(np.full(sample.heads, total), sample.blocks, FORCED)
        recalls = np.stack([
            recall(self.choose(sample, counts, np.full(sample.heads, place)), masses)
            for place in range(len(PATTERNS))
        ])  # fmt: skip
        self.recalls[sample.layer] = self.recalls.get(sample.layer, 0) + recalls

    def finish(self) -> None:
        """Choose the pattern of every head."""
        self.patterns.update({layer: sums.argmax(axis=0) for layer, sums in self.recalls.items()})

    def choose(
        self,
        sample: LayerSample,
        counts: Int[np.ndarray, "Hq Nq"],
        patterns: Int[np.ndarray, " Hq"] | None = None,
    ) -> TokenChoice:
        """Choose as many pairs as `counts` blocks per row have.

        Args:
            sample: one layer of a document.
            counts: blocks of each row.
            patterns: of each head, as indices of `PATTERNS`; None: those of the calibration.
        """
        if patterns is None:
            self._require_calibration(sample.layer)
            patterns = self.patterns[sample.layer]
        attention = _shared_attention(sample, self.queries)
        heads = [
            self._choose_head(sample, attention, head, counts[head], PATTERNS[patterns[head]])
            for head in range(sample.heads)
        ]
        width = max(columns.shape[-1] for _, columns in heads)
        pad = lambda x: np.pad(x, ((0, 0), (0, width - x.shape[-1])), constant_values=-1)
        blocks = np.stack([blocks for blocks, _ in heads])
        return TokenChoice(blocks, np.stack([pad(columns) for _, columns in heads]))

    def _choose_head(self, sample: LayerSample, attention, head: int, counts, pattern: str):
        n = sample.blocks
        forced = forced_grid(n)
        if pattern in SPLITS:
            columns, slashes = attention
            steps = np.abs(block_offsets(n)).astype(int)
            priority, score = slashes[head][steps], columns[head]
        elif pattern == WINDOW:
            priority, score = -block_offsets(n), None
        else:
            priority, score = POOLED.mass(sample)[head], None
        num_forced = forced.sum(axis=-1)
        share = SPLITS.get(pattern, 0.0)
        kept = num_forced + np.rint((1 - share) * (counts - num_forced)).astype(int)
        blocks = take_rows(np.where(causal_grid(n), priority, -np.inf), kept, FORCED)
        if score is None or not share:
            return blocks, np.zeros((n, 0), np.int32)
        return blocks, _best_columns(score, blocks, (counts - kept) * sample.block, sample.block)

    def _require_calibration(self, layer: int | None = None) -> None:
        if not self.patterns or (layer is not None and layer not in self.patterns):
            raise ArgumentError(
                "token-columns-calibration",
                "the rule is not calibrated for this layer",
                got=f"{layer=}, calibrated {sorted(self.patterns)}",
                fix="call observe() with samples of every layer, then finish()",
            )


@functools.lru_cache(maxsize=2)
def _shared_attention(sample: LayerSample, queries: int):
    """Return the mass of every column and of every diagonal of blocks, by the last queries."""
    attention = last_attention(sample, queries)
    return attention.mean(axis=1), stripes(attention, sample.block)[1]


def _best_columns(
    score: Float[np.ndarray, " T"], blocks: Bool[np.ndarray, "Nq Nk"], counts, block: int
) -> Int[np.ndarray, "Nq C"]:
    """Return the keys with the highest scores for each row, in the blocks it does not compute.

    Example:
        >>> blocks = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], bool)
        >>> _best_columns(np.array([.1, .4, .2, .3, 0, 0]), blocks, np.array([0, 1, 3]), 2)
        array([[-1, -1, -1],
               [ 1, -1, -1],
               [ 1,  3,  2]], dtype=int32)
    """
    n = len(blocks)
    is_open = np.tri(n, k=-1, dtype=bool) & ~blocks
    order = np.argsort(-score, kind="stable")
    candidates = is_open[:, order // block]
    taken = candidates & (np.cumsum(candidates, axis=1) <= counts[:, None])
    numbers = taken.sum(axis=1)
    row, place = np.nonzero(taken)
    position = np.arange(len(row)) - np.repeat(np.cumsum(numbers) - numbers, numbers)
    columns = np.full((n, int(numbers.max())), -1, np.int32)
    columns[row, position] = order[place]
    return columns


def recall(choice: TokenChoice, masses: Float[np.ndarray, "Hq Nq T"]) -> Float[np.ndarray, " Hq"]:
    """Return the mean mass of the chosen pairs; `masses` are means over the queries of a row."""
    heads, n, tokens = masses.shape
    by_block = masses.reshape(heads, n, n, tokens // n).sum(axis=-1)
    kept = np.where(choice.blocks, by_block, 0).sum(axis=-1)
    if choice.columns.shape[-1]:
        single = np.take_along_axis(masses, np.maximum(choice.columns, 0), axis=-1)
        kept = kept + np.where(choice.columns >= 0, single, 0).sum(axis=-1)
    return kept.mean(axis=-1)


@functools.partial(jax.jit, static_argnames="block")
def _row_masses(q: Array, k: Array, scale: float, *, block: int) -> Float[Array, "Hq Nq T"]:
    """Return the exact attention to every key, mean over the queries of each row of blocks."""
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    rows = q.reshape(tokens // block, block, heads, -1)

    def of_row(part):
        row, queries = part
        grouped = queries.reshape(block, -1, group, queries.shape[-1])
        s = scale * jnp.einsum("qhgd,khd->hgqk", grouped, k)
        visible = jnp.arange(tokens)[None] <= (row * block + jnp.arange(block))[:, None]
        p = jax.nn.softmax(s, axis=-1, where=visible[None, None])
        return p.mean(axis=2).reshape(heads, tokens)

    masses = jax.lax.map(of_row, (jnp.arange(tokens // block), rows))
    return jnp.moveaxis(masses, 0, 1)
