"""Attention statistics in plain XLA loops: chunks of queries against the spans of keys they see.

A tile of scores is [rows, keys, queries]: sums run over an axis that is not the last one, and the
query heads of a kv head lie along the last one. Scores are in base 2.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.blocking import RowTileSide, pad_axis, take
from xsake.kernels.element_mask import element_mask, rule_of_heads
from xsake.kernels.online_softmax import LOG2E, exp2, log_sum_exp
from xsake.kernels.row_loop import RowBody, RowTable, Step, loop_rows
from xsake.kernels.sharding import axes_of
from xsake.kernels.statistics.spans import span_codes
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs
from xsake.layout.csr import namespace
from xsake.layout.grid import count_blocks
from xsake.masks.coverage import ALL, SOME, UNKNOWN

# Slices that one pass of a tree adds: 8 were fastest on an x86 core, 16 took 1.4 times as long.
_BRANCHES = 8


class Moments(NamedTuple):
    """Moments of scores: `m = max s`, `l = sum 2^(s - m)`, `excess = sum 2^(s - m) (s - m)`.

    Nothing cancels: the maximum is one of the scores, so every term of the entropy has the same
    sign, and a block far below the maximum of its row keeps all its digits.
    """

    m: Array  # -inf where there are no scores
    l: Array  # at least 1, or 0
    excess: Array  # at most 0


class Reductions(NamedTuple):
    """Reductions of an axis; they change no result beyond rounding."""

    highest: Callable
    total: Callable


def init_moments(shape: tuple[int, ...], dtype: Any) -> Moments:
    """Moments of no scores."""
    zeros = jnp.zeros(shape, dtype)
    return Moments(jnp.full(shape, -jnp.inf, dtype), zeros, zeros)


def score_moments(s: Array, axis: int, by: Reductions) -> Moments:
    """Moments of the scores along an axis; -inf is a masked score.

    The two sums may compute p once each: on a CPU that takes as long as to store it.
    """
    m = by.highest(s, axis)
    below = _below(s, jnp.expand_dims(m, axis))
    p = exp2(below)
    return Moments(m, by.total(p, axis), by.total(p * below, axis))


def merge_moments(parts: Moments, axis: int) -> Moments:
    """Merge the moments along an axis."""
    m = parts.m.max(axis)
    below = _below(parts.m, jnp.expand_dims(m, axis))
    alpha = exp2(below)
    excess = parts.excess + parts.l * below
    return Moments(m, (alpha * parts.l).sum(axis), (alpha * excess).sum(axis))


def moments_lse(moments: Moments) -> Array:
    """Log of the sum of exponentials in nats; -inf without scores."""
    return log_sum_exp(moments.m, moments.l)


def entropy(moments: Moments) -> Array:
    """Entropy in nats; 0 without scores."""
    l = jnp.where(moments.l != 0, moments.l, 1)
    return jnp.log(l) - moments.excess / (l * LOG2E)


def _below(s: Array, m: Array) -> Array:
    """Scores minus their maximum, no lower than where 2^x is exactly 0."""
    lowest = -127 if s.dtype == jnp.float32 else -1100
    return jnp.maximum(s - jnp.where(m == -jnp.inf, 0, m), lowest)


def _tree(combine: Callable, reduce: Callable, x: Array, axis: int):
    """Reduce an axis by combining slices, in passes that nothing is fused across.

    XLA:CPU computes one number at a time of what it fuses into a reduction; sums of slices of an
    axis that is not the last one are computed as vectors. 75 million pairs took an x86 core 0.10 s
    this way and 0.23 s with reductions.
    """
    while (size := x.shape[axis]) > 1:
        branches = next((n for n in range(_BRANCHES, 1, -1) if size % n == 0), None)
        if branches is None:
            return reduce(lax.optimization_barrier(x), axis)
        x = functools.reduce(combine, jnp.split(x, branches, axis))
        x = lax.optimization_barrier(x)
    return x.squeeze(axis)


PLAIN = Reductions(jnp.max, jnp.sum)
TREES = Reductions(
    functools.partial(_tree, jnp.maximum, jnp.max), functools.partial(_tree, jnp.add, jnp.sum)
)


@dataclasses.dataclass(frozen=True)
class StatisticsSizes:
    """How a call is cut into rows (batch, head, chunk); it changes no result beyond rounding."""

    chunk: int  # queries of a row
    span: int  # keys that a row meets at once, a whole number of kv blocks
    # Heads of a batch element that have rows of their own; the query heads of one row stand side by
    # side
    heads: int


class TokenPieces(NamedTuple):
    """Positions and segment ids of tokens by piece, [B or 1, pieces, size]; None without."""

    positions: Array | None
    segments: Array | None


class StatisticsCall(NamedTuple):
    """The arrays of a call by chunk and span."""

    inputs: StatisticsInputs
    config: StatisticsConfig
    cut: StatisticsSizes
    q: Array  # [B * heads * chunks, D, queries], scaled
    k: Array  # [B * Hk * spans, span, D]
    q_tokens: TokenPieces
    kv_tokens: TokenPieces

    @property
    def chunks(self) -> int:
        return count_blocks(self.inputs.q.shape[1], self.cut.chunk)

    @property
    def spans(self) -> int:
        return count_blocks(self.inputs.k.shape[1], self.cut.span)

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def queries(self) -> int:
        """Queries of a row, all its heads together."""
        return self.q.shape[-1]

    def scores(self, rows: Array, q: Array, span: Array) -> Array:
        """Scores in base 2 of the rows' queries against a span each, [rows, span, queries]."""
        kv_head = rows // self.chunks * self.inputs.k.shape[2] // self.cut.heads
        k = take(self.k, kv_head * self.spans + span)
        products = jnp.einsum("rnd,rdm->rnm", k, q, precision="highest")
        return online_softmax.to_scores(products, None, self.config.softcap)

    def element_mask(self, rows: Array, span: Array) -> Array:
        """Element mask of such a tile."""
        heads, cut = self.cut.heads, self.cut
        head, chunk = rows // self.chunks, rows % self.chunks
        batch, head = head // heads, head % heads
        q_tokens, kv_tokens = self.inputs.q.shape[1], self.inputs.k.shape[1]
        q = RowTileSide(self.q_tokens, q_tokens, cut.chunk, batch, chunk, axis=2)
        kv = RowTileSide(self.kv_tokens, kv_tokens, cut.span, batch, span, axis=1)
        allows = rule_of_heads(self.config.mask, heads, lambda: head[:, None, None])
        visible = element_mask(q, kv, allows)
        assert visible is not None
        return jnp.tile(visible, (1, 1, self.queries // cut.chunk))

    def in_order(self, lse: Array, entropy: Array, block_lse: Array) -> Statistics:
        """From rows [rows, ..., queries] to [B, Tq, Hq, ...]."""
        batch, q_tokens, q_heads, _ = self.inputs.q.shape
        heads, chunk = self.cut.heads, self.cut.chunk

        def tokens(x: Array) -> Array:
            x = x.reshape(batch, heads, self.chunks, -1, q_heads // heads, chunk)
            x = x.transpose(0, 2, 5, 1, 4, 3)
            return x.reshape(batch, -1, q_heads, x.shape[-1])[:, :q_tokens]

        blocks = count_blocks(self.inputs.k.shape[1], self.config.block_kv)
        return Statistics(
            tokens(lse)[..., 0], tokens(entropy)[..., 0], tokens(block_lse)[..., :blocks]
        )


def row_heads(inputs: StatisticsInputs, config: StatisticsConfig) -> int:
    """Heads that need rows of their own: the query heads of a kv head can share one rule."""
    q_heads, kv_heads = inputs.q.shape[2], inputs.k.shape[2]
    return kv_heads if config.mask.heads in (None, 1, kv_heads) else q_heads


def prepare(
    inputs: StatisticsInputs, config: StatisticsConfig, cut: StatisticsSizes
) -> StatisticsCall:
    """Cut the arrays of a call."""
    batch, _, q_heads, dim = inputs.q.shape
    factor = online_softmax.query_factor(config.scale, config.softcap)
    q = inputs.q.astype(inputs.dtype) * jnp.asarray(factor, inputs.dtype)
    q = _pieces(q, cut.chunk).reshape(batch, -1, cut.chunk, cut.heads, q_heads // cut.heads, dim)
    q = q.transpose(0, 3, 1, 5, 4, 2)
    tokens = lambda size, *x: TokenPieces(*(y if y is None else _pieces(y, size) for y in x))
    k = _pieces(inputs.k.astype(inputs.dtype), cut.span).transpose(0, 3, 1, 2, 4)
    return StatisticsCall(
        inputs,
        config,
        cut,
        q.reshape(-1, dim, q_heads // cut.heads * cut.chunk),
        k.reshape(-1, cut.span, dim),
        tokens(cut.chunk, inputs.q_positions, inputs.q_segment_ids),
        tokens(cut.span, inputs.kv_positions, inputs.kv_segment_ids),
    )


def _pieces(x: Array, size: int) -> Array:
    """[B, T, ...] -> [B, pieces, size, ...], with zeros at the end."""
    x = pad_axis(x, 1, count_blocks(x.shape[1], size) * size, 0)
    return x.reshape(x.shape[0], -1, size, *x.shape[2:])


class SpanLists(NamedTuple):
    """The spans of every row (batch, head, chunk): partial ones first, then full ones."""

    rows: RowTable
    span: Any  # int32 [entries]


def list_spans(
    inputs: StatisticsInputs, config: StatisticsConfig, cut: StatisticsSizes
) -> SpanLists:
    """Every span in which a query of the row may see a key.

    Without positions and segments of its own a call knows its spans while it is traced, as NumPy;
    otherwise they are judged at run time, by the ends of what each chunk and span holds.
    """
    codes = span_codes(inputs, config.mask, cut.chunk, cut.span)
    xp = namespace(codes)
    partial, full = (codes == SOME) | (codes == UNKNOWN), codes == ALL
    order = xp.argsort(xp.where(partial, 0, xp.where(full, 1, 2)), axis=-1, stable=True)
    lists = np.arange(np.prod(codes.shape[:-1]), dtype=np.int32).reshape(codes.shape[:-1])

    def spread(x: Any):
        x = xp.repeat(x, cut.heads // x.shape[1], axis=1)
        return xp.broadcast_to(x, (inputs.q.shape[0], *x.shape[1:])).reshape(-1)

    counts = (x.sum(-1, dtype=xp.int32) for x in (partial, full))
    rows = RowTable(spread(lists * codes.shape[-1]), *map(spread, counts))
    return SpanLists(rows, order.reshape(-1).astype(xp.int32))


class StatisticsTuning(NamedTuple):
    """Tuning of a platform; it changes no result beyond rounding."""

    queries: int  # of a chunk
    keys: int  # of a span
    logits: int  # of a tile
    by: Reductions


# On 2 x86 cores with 1 MB of L2 each, tiles of 2^17 to 2^20 logits are within 10% of each other.
CPU = StatisticsTuning(queries=128, keys=256, logits=9 * 2**16, by=TREES)
ACCELERATOR = StatisticsTuning(queries=512, keys=512, logits=2**24, by=PLAIN)


def statistics(inputs: StatisticsInputs, config: StatisticsConfig, platform: str) -> Statistics:
    """Every statistic of every query, in one pass over the spans that hold a visible key."""
    return _statistics(inputs, config, CPU if platform == "cpu" else ACCELERATOR)


def cut_for(
    inputs: StatisticsInputs, config: StatisticsConfig, tuning: StatisticsTuning
) -> StatisticsSizes:
    """Chunks of equal size that a tile can hold, and spans of whole blocks."""
    q_tokens, kv_tokens = inputs.q.shape[1], inputs.k.shape[1]
    heads = row_heads(inputs, config)
    span = config.block_kv * max(1, min(tuning.keys, kv_tokens) // config.block_kv)
    fitting = tuning.logits // (span * (inputs.q.shape[2] // heads))
    chunks = count_blocks(q_tokens, max(1, min(tuning.queries, fitting)))
    return StatisticsSizes(count_blocks(q_tokens, chunks), span, heads)


def _statistics(
    inputs: StatisticsInputs, config: StatisticsConfig, tuning: StatisticsTuning
) -> Statistics:
    call = prepare(inputs, config, cut_for(inputs, config, tuning))
    lists = list_spans(inputs, config, call.cut)
    blocks = call.cut.span // config.block_kv

    def prologue(rows: Array):
        shape = rows.shape[0], call.spans, blocks, call.queries
        return (rows, take(call.q, rows)), init_moments(shape, inputs.dtype)

    def body(tile: tuple[Array, Array], state: Moments, shared: Any, step: Step):
        rows, q = tile
        span = step.items[:, 0]
        s = call.scores(rows, q, span)
        if step.is_masked:
            s = jnp.where(call.element_mask(rows, span), s, -jnp.inf)
        # The three reductions read finished scores; otherwise each would mask and cap them again.
        s = lax.optimization_barrier(s)
        parts = s.reshape(rows.shape[0], blocks, config.block_kv, call.queries)
        new = score_moments(parts, 2, tuning.by)
        row = np.arange(rows.shape[0], dtype=np.int32)
        index = jnp.where(step.exists[:, 0], row, row.size), span
        return Moments(*map(functools.partial(_store, index), state, new)), shared

    def epilogue(rows: Array, state: Moments, shared: Any):
        state = Moments(*(x.reshape(x.shape[0], -1, call.queries) for x in state))
        whole = merge_moments(state, 1)
        results = moments_lse(whole), entropy(whole), moments_lse(state)
        return tuple(map(functools.partial(_store, rows), shared, results))

    each = jnp.zeros((call.rows, call.queries), inputs.dtype)
    every = jnp.zeros((call.rows, call.spans * blocks, call.queries), inputs.dtype)
    row_body = RowBody(prologue, _span_lookup(lists), body, epilogue)
    sizes = _tile_sizes(call, tuning)
    axes = axes_of(inputs.q)
    return call.in_order(*loop_rows(lists.rows, row_body, sizes, (each, each, every), axes=axes))


def _store(index: Any, buffer: Array, x: Array):
    """Store results; indices past the end are dropped."""
    return buffer.at[index].set(x, mode="drop")


def _tile_sizes(call: StatisticsCall, tuning: StatisticsTuning) -> TileSizes:
    """As many rows as fit, in pairs: XLA:CPU gives each thread whole rows."""
    fitting = tuning.logits // (call.cut.span * call.queries)
    return TileSizes(max(1, min(fitting // 2 * 2, call.rows)), 1)


def _span_lookup(lists: SpanLists):
    """Make `RowBody.lookup`: spans of rows, [rows, 1]; any where there is none."""
    start, span = (jnp.asarray(x) for x in (lists.rows.start, lists.span))

    def lookup(rows: Array, index: Array, exists: Array):
        return take(span, jnp.minimum(take(start, rows)[:, None] + index, span.shape[0] - 1))

    return lookup
