"""Attention statistics in plain XLA loops: chunks of queries against the spans of keys they see.

A tile of scores is [rows, keys, queries]: sums run over an axis that is not the last one, and the
query heads of a kv head lie along the last one.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.blocking import take
from xsake.kernels.row_loop import RowBody, Step, loop_rows
from xsake.kernels.sharding import axes_of
from xsake.kernels.statistics import lse_entropy
from xsake.kernels.statistics.lse_entropy import Moments, Reductions
from xsake.kernels.statistics.schedule import SpanLists, list_spans
from xsake.kernels.statistics.tiles import StatisticsCall, StatisticsSizes, prepare, row_heads
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs
from xsake.layout.grid import count_blocks


class StatisticsTuning(NamedTuple):
    """Tuning of a platform; it changes no result beyond rounding."""

    queries: int  # of a chunk
    keys: int  # of a span
    logits: int  # of a tile
    by: Reductions


# On 2 x86 cores with 1 MB of L2 each, tiles of 2^17 to 2^20 logits are within 10% of each other.
CPU = StatisticsTuning(queries=128, keys=256, logits=9 * 2**16, by=lse_entropy.TREES)
ACCELERATOR = StatisticsTuning(queries=512, keys=512, logits=2**24, by=lse_entropy.PLAIN)


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
        return (rows, take(call.q, rows)), lse_entropy.init_moments(shape, inputs.dtype)

    def body(tile: tuple[Array, Array], state: Moments, shared: Any, step: Step):
        rows, q = tile
        span = step.items[:, 0]
        s = call.scores(rows, q, span)
        if step.is_masked:
            s = jnp.where(call.element_mask(rows, span), s, -jnp.inf)
        # The three reductions read finished scores; otherwise each would mask and cap them again.
        s = lax.optimization_barrier(s)
        parts = s.reshape(rows.shape[0], blocks, config.block_kv, call.queries)
        new = lse_entropy.score_moments(parts, 2, tuning.by)
        row = np.arange(rows.shape[0], dtype=np.int32)
        index = jnp.where(step.exists[:, 0], row, row.size), span
        return Moments(*map(functools.partial(_store, index), state, new)), shared

    def epilogue(rows: Array, state: Moments, shared: Any):
        state = Moments(*(x.reshape(x.shape[0], -1, call.queries) for x in state))
        whole = lse_entropy.merge_moments(state, 1)
        results = lse_entropy.lse(whole), lse_entropy.entropy(whole), lse_entropy.lse(state)
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
