"""Attention statistics in plain XLA loops: chunks of queries meet the spans of keys they may see.

A tile of logits is [rows, keys, queries]: what is summed lies along an axis that is not the last
one, and the query heads of a kv head stand side by side along the last one.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake.kernels.block_sparse.blocked import take
from xsake.kernels.block_sparse.problem import TileSizes
from xsake.kernels.block_sparse.walk import Step, Visitor, walk
from xsake.kernels.platforms import by_platform
from xsake.kernels.statistics import moments
from xsake.kernels.statistics.call import Call, Cut, prepare, row_heads
from xsake.kernels.statistics.moments import Moments, Reductions
from xsake.kernels.statistics.problem import Operands, Problem, Statistics
from xsake.kernels.statistics.schedule import Visits, visits
from xsake.kernels.varying import axes_of
from xsake.layout.grid import blocks_of


class Tuning(NamedTuple):
    """What suits a platform; it changes no result beyond rounding."""

    queries: int  # of a chunk
    keys: int  # of a span
    logits: int  # of a tile
    by: Reductions


# On 2 x86 cores with 1 MB of L2 each, tiles of 2^17 to 2^20 logits are within 10% of each other.
CPU = Tuning(queries=128, keys=256, logits=9 * 2**16, by=moments.TREES)
ACCELERATOR = Tuning(queries=512, keys=512, logits=2**24, by=moments.PLAIN)


def statistics(operands: Operands, problem: Problem) -> Statistics:
    """Every statistic of every query, in one pass over the spans that hold a visible key."""

    def on(tuning: Tuning):
        return lambda *arrays: _statistics(Operands(*arrays), problem, tuning)

    return by_platform({"cpu": on(CPU)}, on(ACCELERATOR), *operands)


def cut_for(operands: Operands, problem: Problem, tuning: Tuning) -> Cut:
    """Chunks of equal size that a tile can hold, and spans of whole blocks."""
    q_tokens, kv_tokens = operands.q.shape[1], operands.k.shape[1]
    heads = row_heads(operands, problem)
    span = problem.block_kv * max(1, min(tuning.keys, kv_tokens) // problem.block_kv)
    fitting = tuning.logits // (span * (operands.q.shape[2] // heads))
    chunks = blocks_of(q_tokens, max(1, min(tuning.queries, fitting)))
    return Cut(blocks_of(q_tokens, chunks), span, heads)


def _statistics(operands: Operands, problem: Problem, tuning: Tuning) -> Statistics:
    call = prepare(operands, problem, cut_for(operands, problem, tuning))
    lists = visits(operands, problem, call.cut)
    blocks = call.cut.span // problem.block_kv

    def begin(rows):
        shape = rows.shape[0], call.spans, blocks, call.queries
        return (rows, take(call.q, rows)), moments.nothing(shape, operands.dtype)

    def visit(tile, state, shared, step: Step):
        rows, q = tile
        span = step.items[:, 0]
        logits = call.logits(rows, q, span)
        if step.masked:
            logits = jnp.where(call.visible(rows, span), logits, -jnp.inf)
        # The three reductions read finished logits; otherwise each would mask and cap them again.
        logits = lax.optimization_barrier(logits)
        parts = logits.reshape(rows.shape[0], blocks, problem.block_kv, call.queries)
        found = moments.of_logits(parts, 2, tuning.by)
        own = np.arange(rows.shape[0], dtype=np.int32)
        place = jnp.where(step.exists[:, 0], own, own.size), span
        return Moments(*map(functools.partial(_stored, place), state, found)), shared

    def finish(rows, state, shared):
        state = Moments(*(x.reshape(x.shape[0], -1, call.queries) for x in state))
        whole = moments.merged(state, 1)
        found = moments.lse(whole), moments.entropy(whole), moments.lse(state)
        return tuple(map(functools.partial(_stored, rows), shared, found))

    each = jnp.zeros((call.rows, call.queries), operands.dtype)
    every = jnp.zeros((call.rows, call.spans * blocks, call.queries), operands.dtype)
    visitor = Visitor(begin, _fetch(lists), visit, finish)
    sizes = _tile_sizes(call, tuning)
    axes = axes_of(operands.q)
    return call.in_order(*walk(lists.rows, visitor, sizes, (each, each, every), axes=axes))


def _stored(place, room, found):
    """`room` with what was found; a place past the end is nobody's."""
    return room.at[place].set(found, mode="drop")


def _tile_sizes(call: Call, tuning: Tuning) -> TileSizes:
    """As many rows as fit, in pairs: XLA:CPU gives each thread whole rows."""
    fitting = tuning.logits // (call.cut.span * call.queries)
    return TileSizes(max(1, min(fitting // 2 * 2, call.rows)), 1)


def _fetch(lists: Visits):
    """The spans that rows meet, [rows, 1]; any where there is none."""
    start, span = (jnp.asarray(x) for x in (lists.rows.start, lists.span))

    def fetch(rows, turns, exists):
        return take(span, jnp.minimum(take(start, rows)[:, None] + turns, span.shape[0] - 1))

    return fetch
