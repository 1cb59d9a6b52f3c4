"""Selected attention in plain XLA loops, kv-major: a block meets only the queries that chose it.

Queries that selected the same block are gathered into tiles, so that every product is a matrix
product whatever the group size. A tile leaves a partial softmax for each of its queries, with the
query's own maximum, and each query then adds up its slots. The backward pass computes all three
gradients from one visit to each tile; every sum has one owner and one order.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse import tiles as softmax
from xsake.kernels.block_sparse.problem import cleaned
from xsake.kernels.platforms import by_platform
from xsake.kernels.selected import call
from xsake.kernels.selected.call import Chunk, Cut, Known, Partial, Tuning, cut_for
from xsake.kernels.selected.lists import Tiles
from xsake.kernels.selected.problem import Cotangents, Gradients, Operands, Problem

# On 2 x86 cores, tiles of 192 and of 384 rows are alike, tiles of 96 lose a third; a step of 8
# tiles keeps what it computes in the cache.
CPU = Tuning(rows=256, tiles=8, queries=1024)
ACCELERATOR = Tuning(rows=256, tiles=64, queries=4096)


def platforms() -> tuple[str, ...] | None:
    """Where this backend runs: None is everywhere."""
    return None


def unsupported(operands: Operands) -> str | None:
    """Why this backend cannot serve the call; None if it can: it serves every call."""
    return None


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    return _by_platform(_forward, operands, problem)


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients for q, k and v, recomputing the weights of the selected blocks once."""
    return _by_platform(_backward, operands, problem, (out, lse), tuple(cotangents))


def _by_platform(run, operands: Operands, problem: Problem, *rest):
    def on(tuning: Tuning):
        def branch(operands, *rest):
            operands = Operands(*operands)
            return run(operands, problem, cut_for(operands, problem, tuning), *rest)

        return branch

    return by_platform({"cpu": on(CPU)}, on(ACCELERATOR), tuple(operands), *rest)


def _forward(operands: Operands, problem: Problem, cut: Cut):
    factor = softmax.query_factor(problem.scale, None)
    return call.forward(operands, problem, cut, functools.partial(_visit_forward, cut, factor))


def _backward(operands: Operands, problem: Problem, cut: Cut, saved, wanted) -> Gradients:
    factor = softmax.query_factor(problem.scale, None)
    visit = functools.partial(_visit_backward, cut, factor)
    return call.backward(operands, problem, cut, visit, saved, wanted)


class Met(NamedTuple):
    """What a step's tiles know: rows are (query, head of the group) pairs."""

    query: Any  # [step, tile]
    block: Any  # [step]
    q: Any  # [step, rows, D], not scaled
    k: Any  # [step, block, D]
    v: Any  # [step, block, Dv]
    logits: Any  # [step, rows, block], in bits, -inf where there is no pair


def _met(chunk: Chunk, tiles: Tiles, turn, cut: Cut, factor: float) -> Met:
    part = lambda x: lax.dynamic_slice_in_dim(x, turn * cut.step, cut.step, 0)
    query, block = part(tiles.query), part(tiles.block)
    q = _taken(chunk.q, query).reshape(cut.step, cut.rows, -1)
    k, v = _taken(chunk.k, block), _taken(chunk.v, block)
    scaled = q.astype(k.dtype) * jnp.asarray(factor, k.dtype)
    logits = softmax.matmul(scaled, jnp.swapaxes(k, 1, 2))
    size = k.shape[1]
    key = block[:, None, None] * size + jnp.arange(size)[None, None]
    seen = key <= _taken(chunk.positions, query)[:, :, None]
    seen = jnp.broadcast_to(seen[:, :, None], (cut.step, cut.tile, cut.group, size))
    logits = jnp.where(seen.reshape(logits.shape), logits, -jnp.inf)
    return Met(query, block, q, k, v, logits)


def _taken(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def _stored(room, turn, found):
    """`room` with a step's results, in place."""
    return lax.dynamic_update_slice_in_dim(room, found, turn * found.shape[0], 0)


def _visit_forward(cut: Cut, factor: float, chunk: Chunk, tiles: Tiles, partial: Partial):
    def step(state):
        turn, partial = state
        met = _met(chunk, tiles, turn, cut, factor)
        peak = met.logits.max(-1)
        origin = jnp.where(peak == -jnp.inf, 0, peak)
        weight = softmax.weights(met.logits, origin[..., None])
        found = softmax.matmul(weight, met.v), peak, weight.sum(-1)
        rooms = zip(partial, found, strict=True)
        return turn + 1, Partial(*(_stored(room, turn, x) for room, x in rooms))

    going = lambda state: state[0] * cut.step < tiles.total
    return lax.while_loop(going, step, (jnp.int32(0), partial))[1]


def _visit_backward(cut: Cut, factor: float, chunk: Chunk, known: Known, tiles: Tiles, sums: tuple):
    of_keys = lambda x, y: jnp.einsum("rmn,rmd->rnd", x, y, precision="highest")

    def step(state):
        turn, room, d_k, d_v = state
        met = _met(chunk, tiles, turn, cut, factor)
        rows = lambda x: _taken(x, met.query).reshape(cut.step, cut.rows, -1)
        d_out, lse, delta = map(rows, known)
        weight = softmax.weights(met.logits, lse)
        products = softmax.matmul(d_out, jnp.swapaxes(met.v, 1, 2))
        slope = softmax.logit_gradient(weight, products, delta, None)
        slope = jnp.where(met.logits == -jnp.inf, 0, slope)
        weight = jnp.where(met.logits == -jnp.inf, 0, weight)
        room = _stored(room, turn, softmax.matmul(slope, cleaned(met.k)))
        d_k = _added(d_k, met.block, of_keys(slope, cleaned(met.q.astype(slope.dtype))))
        d_v = _added(d_v, met.block, of_keys(weight, cleaned(d_out)))
        return turn + 1, room, d_k, d_v

    going = lambda state: state[0] * cut.step < tiles.total
    return lax.while_loop(going, step, (jnp.int32(0), *sums))[1:]


def _added(total, blocks, found):
    """Add each tile's share to its block, tile by tile: the order is always the same."""

    def add(tile, total):
        old = lax.dynamic_index_in_dim(total, blocks[tile], 0)
        new = lax.dynamic_index_in_dim(found, tile, 0)
        return lax.dynamic_update_index_in_dim(total, old + new, blocks[tile], 0)

    return lax.fori_loop(0, found.shape[0], add, total)
