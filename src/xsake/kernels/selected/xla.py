"""Selected attention in plain XLA loops, kv-major: a block meets only the queries that chose it.

Queries that selected the same block are gathered into tiles, so that every product is a matrix
product whatever the group size. A tile leaves a partial softmax for each of its queries, with the
query's own maximum, and each query then adds up its slots. The backward pass computes all three
gradients from one visit to each tile; every sum has one owner and one order.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse import tiles as softmax
from xsake.kernels.block_sparse.problem import cleaned, quarantine
from xsake.kernels.platforms import by_platform
from xsake.kernels.selected.lists import Tiles, most_tiles, tiles_of
from xsake.kernels.selected.problem import Cotangents, Gradients, Operands, Problem


class Tuning(NamedTuple):
    """What suits a platform; it changes no result beyond rounding."""

    rows: int  # of a tile, the query heads of a group counted
    tiles: int  # of a step
    queries: int  # fewest of a chunk, whose partial results are kept at once


# On 2 x86 cores, tiles of 192 and of 384 rows are alike, tiles of 96 lose a third; a step of 8
# tiles keeps what it computes in the cache.
CPU = Tuning(rows=256, tiles=8, queries=1024)
ACCELERATOR = Tuning(rows=256, tiles=64, queries=4096)


class Cut(NamedTuple):
    """How a call is cut."""

    tile: int  # queries of a tile
    step: int  # tiles computed together
    chunk: int  # queries of a chunk
    chunks: int  # of a kv head
    room: int  # tiles of a chunk, at most


class Call(NamedTuple):
    """The arrays of a call by kv head (batch times head), tokens in chunks and blocks."""

    q: Any  # [heads, chunks, chunk, G * D], as the caller has it
    blocks: Any  # [heads, chunks, chunk, slots]
    positions: Any  # [heads or 1, chunks, chunk]; -1 sees nothing
    k: Any  # [heads, Nk, block, D], NaN where the value is not finite
    v: Any  # [heads, Nk, block, Dv], finite


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    return _by_platform(_forward, operands, problem)


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients for q, k and v, recomputing the weights of the selected blocks once."""
    return _by_platform(_backward, operands, problem, out, lse, cotangents)


def _by_platform(run, operands: Operands, problem: Problem, *rest):
    def on(tuning: Tuning):
        def branch(operands, *rest):
            return run(Operands(*operands), problem, cut_for(operands, problem, tuning), *rest)

        return branch

    return by_platform({"cpu": on(CPU)}, on(ACCELERATOR), tuple(operands), *rest)


def cut_for(operands, problem: Problem, tuning: Tuning) -> Cut:
    """Tiles of few rows that stay nearly full: chunks grow with the number of blocks."""
    q, k, _, blocks, _ = operands
    queries, slots = q.shape[1], blocks.shape[-1]
    kv_blocks, group = -(-k.shape[1] // problem.block), q.shape[2] // k.shape[2]
    tile = min(2 ** max(0, math.ceil(math.log2(tuning.rows / group)) - 1), queries)
    wanted = max(tuning.queries, 4 * tile * kv_blocks // slots)
    chunks = -(-queries // min(wanted, queries))
    chunk = -(-queries // chunks)
    room = most_tiles(chunk, slots, kv_blocks, tile)
    step = min(tuning.tiles, room)
    return Cut(tile, step, chunk, chunks, -(-room // step) * step)


def _prepared(operands: Operands, problem: Problem, cut: Cut) -> Call:
    batch, tokens, heads, _ = operands.k.shape
    k, v = quarantine(*(x.astype(operands.dtype) for x in operands[1:3]))

    def in_blocks(x):
        pad = ((0, 0), (0, -tokens % problem.block), (0, 0), (0, 0))
        x = jnp.moveaxis(jnp.pad(x, pad), 2, 1)
        return x.reshape(batch * heads, -1, problem.block, x.shape[-1])

    positions = jnp.repeat(operands.positions, heads, axis=0)
    if operands.q_positions is None:
        positions = positions[:1]
    spare = cut.chunks * cut.chunk - operands.q.shape[1]
    positions = jnp.pad(positions, ((0, 0), (0, spare)), constant_values=-1)
    blocks = jnp.moveaxis(operands.blocks, 2, 1).reshape(batch * heads, operands.q.shape[1], -1)
    blocks = jnp.pad(blocks, ((0, 0), (0, spare), (0, 0)), constant_values=-1)
    return Call(
        _by_group(operands.q, heads, cut),
        blocks.reshape(*blocks.shape[:1], cut.chunks, cut.chunk, -1),
        positions.reshape(-1, cut.chunks, cut.chunk),
        in_blocks(k),
        in_blocks(v),
    )


def _by_group(x, heads: int, cut: Cut):
    """[B, Tq, Hq, ...] as [batch * kv heads, chunks, chunk, G * ...], zeros after the end."""
    batch, tokens, q_heads, *rest = x.shape
    x = x.reshape(batch, tokens, heads, q_heads // heads * math.prod(rest))
    x = jnp.moveaxis(x, 2, 1).reshape(batch * heads, tokens, -1)
    x = jnp.pad(x, ((0, 0), (0, cut.chunks * cut.chunk - tokens), (0, 0)))
    return x.reshape(batch * heads, cut.chunks, cut.chunk, -1)


def _of_group(x, like, dim: int | None):
    """The way back: [heads, chunks, chunk, G (, dim)] as [B, Tq, Hq (, dim)]."""
    batch, tokens, q_heads, _ = like.shape
    x = x.reshape(batch, x.shape[0] // batch, -1, *x.shape[3:])[:, :, :tokens]
    shape = (batch, tokens, q_heads) if dim is None else (batch, tokens, q_heads, dim)
    return jnp.moveaxis(x, 1, 2).reshape(shape)


def _with_nobody(x, value=0):
    """One more row, for places of a tile that no query takes."""
    return jnp.pad(x, ((0, 1),) + ((0, 0),) * (x.ndim - 1), constant_values=value)


class Met(NamedTuple):
    """What a step's tiles know: rows are (query, head of the group) pairs."""

    query: Any  # [step, tile]
    block: Any  # [step]
    q: Any  # [step, tile * G, D], not scaled
    k: Any  # [step, block, D]
    v: Any  # [step, block, Dv]
    logits: Any  # [step, tile * G, block], in bits, -inf where there is no pair


def _met(chunk: Call, tiles: Tiles, turn, group: int, factor: float, cut: Cut) -> Met:
    part = lambda x: lax.dynamic_slice_in_dim(x, turn * cut.step, cut.step, 0)
    query, block = part(tiles.query), part(tiles.block)
    take = lambda x, index: x.at[index].get(mode="promise_in_bounds")
    q = take(chunk.q, query).reshape(cut.step, cut.tile * group, -1)
    k, v = take(chunk.k, block), take(chunk.v, block)
    scaled = q.astype(k.dtype) * jnp.asarray(factor, k.dtype)
    logits = softmax.matmul(scaled, jnp.swapaxes(k, 1, 2))
    size = k.shape[1]
    key = block[:, None, None] * size + jnp.arange(size)[None, None]
    seen = key <= take(chunk.positions, query)[:, :, None]
    seen = jnp.broadcast_to(seen[:, :, None], (cut.step, cut.tile, group, size))
    logits = jnp.where(seen.reshape(logits.shape), logits, -jnp.inf)
    return Met(query, block, q, k, v, logits)


def _chunk_of(call: Call, number, cut: Cut) -> tuple[Call, Tiles]:
    """One chunk of one kv head, and its tiles."""
    head, part = number // cut.chunks, number % cut.chunks
    blocks = call.blocks[head, part]
    chunk = Call(
        _with_nobody(call.q[head, part]),
        blocks,
        _with_nobody(call.positions[head % call.positions.shape[0], part], -1),
        call.k[head],
        call.v[head],
    )
    return chunk, tiles_of(blocks, call.k.shape[1], cut.tile, cut.room)


def _stored(room, turn, found):
    """`room` with a step's results, in place."""
    return lax.dynamic_update_slice_in_dim(room, found, turn * found.shape[0], 0)


def _slots_summed(partial, place, weight=None):
    """Sum over a query's slots of its partial results, [queries, G, dim]; unused ones are zero."""

    def add(total, slot):
        where, factor = slot
        found = partial.at[where].get(mode="promise_in_bounds")
        return total + (found if factor is None else factor[..., None] * found), None

    factors = None if weight is None else jnp.moveaxis(weight, 1, 0)
    start = jnp.zeros((place.shape[0], *partial.shape[1:]), partial.dtype)
    return lax.scan(add, start, (place.T, factors), unroll=min(8, place.shape[1]))[0]


def _rooms(cut: Cut, group: int, dim: int, dtype):
    """Partial results of a chunk, and a step that nobody writes: unused slots read zeros there."""
    return jnp.zeros((cut.room + cut.step, cut.tile * group, dim), dtype)


def _forward(operands: Operands, problem: Problem, cut: Cut):
    call = _prepared(operands, problem, cut)
    group, dim = operands.q.shape[2] // operands.k.shape[2], operands.v.shape[-1]
    factor = softmax.query_factor(problem.scale, None)

    def one(rooms, number):
        chunk, tiles = _chunk_of(call, number, cut)

        def step(state):
            turn, sums, peaks, masses = state
            met = _met(chunk, tiles, turn, group, factor, cut)
            peak = met.logits.max(-1)
            origin = jnp.where(peak == -jnp.inf, 0, peak)
            weight = softmax.weights(met.logits, origin[..., None])
            found = softmax.matmul(weight, met.v), peak, weight.sum(-1)
            rooms = zip((sums, peaks, masses), found, strict=True)
            return turn + 1, *(_stored(room, turn, x) for room, x in rooms)

        going = lambda state: state[0] * cut.step < tiles.total
        _, *rooms = lax.while_loop(going, step, (jnp.int32(0), *rooms))
        return tuple(rooms), _joined(rooms, tiles.place, group, cut)

    rows = cut.tile * group
    rooms = (
        _rooms(cut, group, dim, operands.dtype),
        jnp.full((cut.room + cut.step, rows), -jnp.inf, operands.dtype),
        jnp.zeros((cut.room + cut.step, rows), operands.dtype),
    )
    numbers = jnp.arange(call.q.shape[0] * cut.chunks)
    _, (out, lse) = lax.scan(one, rooms, numbers)
    shaped = lambda x: x.reshape(call.q.shape[0], cut.chunks, *x.shape[1:])
    out = _of_group(shaped(out), operands.q, dim).astype(operands.q.dtype)
    return out, _of_group(shaped(lse), operands.q, None)


def _joined(rooms, place, group: int, cut: Cut):
    """`(out, lse)` of a chunk's queries from their partial softmaxes."""
    sums, peaks, masses = (x.reshape(-1, group, *x.shape[2:]) for x in rooms)
    peak = peaks.at[place].get(mode="promise_in_bounds")
    mass = masses.at[place].get(mode="promise_in_bounds")
    highest = peak.max(1)
    origin = jnp.where(highest == -jnp.inf, 0, highest)
    weight = softmax.exp2(peak - origin[:, None])
    total = (weight * mass).sum(1)
    out = _slots_summed(sums, place, weight)
    return softmax.normalised(out, total[..., None]), softmax.log_sum_exp(highest, total)


def _backward(operands, problem, cut: Cut, out, lse, cotangents) -> Gradients:
    call = _prepared(operands, problem, cut)
    heads, dtype = operands.k.shape[2], operands.dtype
    group, dim = operands.q.shape[2] // heads, operands.q.shape[3]
    factor = softmax.query_factor(problem.scale, None)
    d_out = cotangents[0].astype(dtype)
    delta = (d_out * out.astype(dtype)).sum(-1) - cotangents[1].astype(dtype)
    d_outs = _by_group(d_out, heads, cut)
    stats = [_by_group(x, heads, cut) for x in (softmax.lse_in_unit(lse), delta)]

    def one(carry, number):
        room, d_k, d_v = carry
        chunk, tiles = _chunk_of(call, number, cut)
        head, part = number // cut.chunks, number % cut.chunks
        given, *known = (_with_nobody(x[head, part]) for x in (d_outs, *stats))

        def step(state):
            turn, room, d_k, d_v = state
            met = _met(chunk, tiles, turn, group, factor, cut)
            take = lambda x: x.at[met.query].get(mode="promise_in_bounds")
            own_lse, own_delta = (take(x).reshape(*met.logits.shape[:2], 1) for x in known)
            own_out = take(given).reshape(cut.step, cut.tile * group, -1)
            weight = softmax.weights(met.logits, own_lse)
            products = softmax.matmul(own_out, jnp.swapaxes(met.v, 1, 2))
            slope = softmax.logit_gradient(weight, products, own_delta, None)
            slope = jnp.where(met.logits == -jnp.inf, 0, slope)
            weight = jnp.where(met.logits == -jnp.inf, 0, weight)
            of_keys = lambda x, y: jnp.einsum("rmn,rmd->rnd", x, y, precision="highest")
            room = _stored(room, turn, softmax.matmul(slope, cleaned(met.k)))
            d_k = _added(d_k, head, met.block, of_keys(slope, cleaned(met.q.astype(dtype))))
            d_v = _added(d_v, head, met.block, of_keys(weight, cleaned(own_out)))
            return turn + 1, room, d_k, d_v

        going = lambda state: state[0] * cut.step < tiles.total
        _, room, d_k, d_v = lax.while_loop(going, step, (jnp.int32(0), room, d_k, d_v))
        return (room, d_k, d_v), _slots_summed(room.reshape(-1, group, dim), tiles.place)

    zeros = jnp.zeros_like(call.k), jnp.zeros_like(call.v)
    numbers = jnp.arange(call.q.shape[0] * cut.chunks)
    carry = (_rooms(cut, group, dim, dtype), *zeros)
    (_, d_k, d_v), d_q = lax.scan(one, carry, numbers)
    d_q = d_q.reshape(call.q.shape[0], cut.chunks, *d_q.shape[1:]) * problem.scale
    return Gradients(
        _of_group(d_q, operands.q, dim).astype(operands.q.dtype),
        _of_blocks(d_k * problem.scale, operands.k),
        _of_blocks(d_v, operands.v),
    )


def _added(total, head, blocks, found):
    """Add each tile's share to its block, tile by tile: the order is always the same."""

    def add(tile, total):
        at = tuple(jnp.asarray(x, jnp.int32) for x in (head, blocks[tile], 0, 0))
        old = lax.dynamic_slice(total, at, (1, 1, *total.shape[2:]))
        new = lax.dynamic_slice_in_dim(found, tile, 1, 0)
        return lax.dynamic_update_slice(total, old + new[None], at)

    return lax.fori_loop(0, found.shape[0], add, total)


def _of_blocks(x, like):
    """[heads, Nk, block, dim] as [B, Tk, Hk, dim]."""
    batch, tokens, heads, dim = like.shape
    x = x.reshape(batch, heads, -1, dim)[:, :, :tokens]
    return jnp.moveaxis(x, 1, 2).astype(like.dtype)
