"""A call of selected attention cut into chunks: what every backend that visits tiles shares.

A backend visits the tiles of one chunk of queries of one kv head. What leads there, and how the
partial results of a query's slots become its own, is here.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse import tiles as softmax
from xsake.kernels.block_sparse.problem import quarantine
from xsake.kernels.selected.lists import Tiles, most_tiles, tiles_of
from xsake.kernels.selected.problem import Gradients, Operands, Problem
from xsake.kernels.varying import axes_of, vary


class Tuning(NamedTuple):
    """What suits a platform; it changes no result beyond rounding."""

    rows: int  # of a tile, the query heads of a group counted
    tiles: int  # of a step
    queries: int  # fewest of a chunk, whose partial results are kept at once


class Cut(NamedTuple):
    """How a call is cut."""

    tile: int  # queries of a tile
    step: int  # tiles computed together
    chunk: int  # queries of a chunk
    chunks: int  # of a kv head
    room: int  # tiles of a chunk, at most
    group: int  # query heads of a kv head

    @property
    def rows(self) -> int:
        """Of a tile: (query, head of the group) pairs."""
        return self.tile * self.group

    @property
    def slots(self) -> int:
        """Tiles that there is room for: one step more, which unused slots read and find empty."""
        return self.room + self.step


class Call(NamedTuple):
    """The arrays of a call by kv head (batch times head), tokens in chunks and blocks."""

    q: Any  # [heads, chunks, chunk, G * D], as the caller has it
    blocks: Any  # [heads, chunks, chunk, slots]
    positions: Any  # [heads or 1, chunks, chunk]; -1 sees nothing
    k: Any  # [heads, Nk, block, D], NaN where the value is not finite
    v: Any  # [heads, Nk, block, Dv], finite


class Chunk(NamedTuple):
    """One chunk of one kv head; the last row of the queries is nobody's."""

    q: Any  # [chunk + 1, G * D]
    positions: Any  # [chunk + 1]
    k: Any  # [Nk, block, D]
    v: Any  # [Nk, block, Dv]


class Known(NamedTuple):
    """What the backward pass knows of a chunk's queries; the last row is nobody's."""

    d_out: Any  # [chunk + 1, G * Dv]
    lse: Any  # [chunk + 1, G], in bits; +inf weighs nothing
    delta: Any  # [chunk + 1, G]


class Partial(NamedTuple):
    """Softmaxes under way, of the rows of every tile: relative to their highest logit, in bits."""

    sums: Any  # [slots, rows, Dv]
    peaks: Any  # [slots, rows]; -inf where nothing was seen
    masses: Any  # [slots, rows]


def cut_for(operands: Operands, problem: Problem, tuning: Tuning) -> Cut:
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
    return Cut(tile, step, chunk, chunks, -(-room // step) * step, group)


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


def _slots_summed(partial, place, weight=None):
    """Sum over a query's slots of its partial results, [queries, G, dim]; unused ones are zero."""

    def add(total, slot):
        where, factor = slot
        found = partial.at[where].get(mode="promise_in_bounds")
        return total + (found if factor is None else factor[..., None] * found), None

    factors = None if weight is None else jnp.moveaxis(weight, 1, 0)
    start = jnp.zeros((place.shape[0], *partial.shape[1:]), partial.dtype)
    start = vary(start, axes_of(partial))
    return lax.scan(add, start, (place.T, factors), unroll=min(8, place.shape[1]))[0]


def forward(operands: Operands, problem: Problem, cut: Cut, visit: Callable):
    """`(out, lse)`; `visit(chunk, tiles, partial)` gives the partial results of a chunk's tiles."""
    call, dim, dtype = _prepared(operands, problem, cut), operands.v.shape[-1], operands.dtype

    def one(partial, number):
        chunk, tiles = _chunk_of(call, number // cut.chunks, number % cut.chunks, cut)
        partial = visit(chunk, tiles, partial)
        return partial, _joined(partial, tiles.place, cut)

    partial = Partial(
        jnp.zeros((cut.slots, cut.rows, dim), dtype),
        jnp.full((cut.slots, cut.rows), -jnp.inf, dtype),
        jnp.zeros((cut.slots, cut.rows), dtype),
    )
    heads = call.q.shape[0]
    partial = vary(partial, axes_of(operands.q))
    _, (out, lse) = lax.scan(one, partial, jnp.arange(heads * cut.chunks))
    shaped = lambda x: x.reshape(heads, cut.chunks, *x.shape[1:])
    out = _of_group(shaped(out), operands.q, dim).astype(operands.q.dtype)
    return out, _of_group(shaped(lse), operands.q, None)


def _joined(partial: Partial, place, cut: Cut):
    """`(out, lse)` of a chunk's queries from their partial softmaxes."""
    sums, peaks, masses = (x.reshape(-1, cut.group, *x.shape[2:]) for x in partial)
    peak = peaks.at[place].get(mode="promise_in_bounds")
    mass = masses.at[place].get(mode="promise_in_bounds")
    highest = peak.max(1)
    origin = jnp.where(highest == -jnp.inf, 0, highest)
    weight = softmax.exp2(peak - origin[:, None])
    total = (weight * mass).sum(1)
    out = _slots_summed(sums, place, weight)
    return softmax.normalised(out, total[..., None]), softmax.log_sum_exp(highest, total)


def backward(
    operands: Operands, problem: Problem, cut: Cut, visit: Callable, saved: tuple, wanted: tuple
) -> Gradients:
    """Gradients from the saved (out, lse) and what is wanted of both.

    `visit(chunk, known, tiles, (of_q, of_k, of_v))` adds what a chunk's tiles give to the keys and
    values of its kv head, and gives the partial gradients of the tiles' rows.
    """
    call, dtype = _prepared(operands, problem, cut), operands.dtype
    (out, lse), d_out = saved, wanted[0].astype(dtype)
    delta = (d_out * out.astype(dtype)).sum(-1) - wanted[1].astype(dtype)
    arrays = d_out, softmax.lse_in_unit(lse), delta
    given = [_by_group(x, operands.k.shape[2], cut) for x in arrays]
    dim, axes = operands.q.shape[3], axes_of(operands.q)

    def of_head(room, head):
        def one(carry, part):
            chunk, tiles = _chunk_of(call, head, part, cut)
            known = Known(*(_with_nobody(x[head, part]) for x in given))
            room, *sums = visit(chunk, known, tiles, carry)
            found = _slots_summed(room.reshape(-1, cut.group, dim), tiles.place)
            return (room, *sums), found

        start = vary((room, jnp.zeros_like(call.k[0]), jnp.zeros_like(call.v[0])), axes)
        (room, d_k, d_v), d_q = lax.scan(one, start, jnp.arange(cut.chunks))
        return room, (d_q, d_k, d_v)

    room = vary(jnp.zeros((cut.slots, cut.rows, dim), dtype), axes)
    _, (d_q, d_k, d_v) = lax.scan(of_head, room, jnp.arange(call.q.shape[0]))
    return Gradients(
        _of_group(d_q * problem.scale, operands.q, dim).astype(operands.q.dtype),
        _of_blocks(d_k * problem.scale, operands.k),
        _of_blocks(d_v, operands.v),
    )


def _chunk_of(call: Call, head, part, cut: Cut) -> tuple[Chunk, Tiles]:
    """One chunk of one kv head, and its tiles."""
    chunk = Chunk(
        _with_nobody(call.q[head, part]),
        _with_nobody(call.positions[head % call.positions.shape[0], part], -1),
        call.k[head],
        call.v[head],
    )
    return chunk, tiles_of(call.blocks[head, part], call.k.shape[1], cut.tile, cut.room)


def rows_of(x, tiles: Tiles, cut: Cut):
    """[slots, rows, ...] of what each query has by head of the group; unused tiles are nobody's."""
    nobody = jnp.full((cut.step, cut.tile), cut.chunk, jnp.int32)
    query = jnp.concatenate([tiles.query, nobody])
    return x.at[query].get(mode="promise_in_bounds").reshape(cut.slots, cut.rows, -1)


def position_rows(chunk: Chunk, tiles: Tiles, cut: Cut):
    """[slots, 1, rows]: the position of every row of every tile."""
    rows = rows_of(jnp.repeat(chunk.positions[:, None], cut.group, axis=1), tiles, cut)
    return rows.reshape(cut.slots, 1, cut.rows)


def _of_blocks(x, like):
    """[heads, Nk, block, dim] as [B, Tk, Hk, dim]."""
    batch, tokens, heads, dim = like.shape
    x = x.reshape(batch, heads, -1, dim)[:, :, :tokens]
    return jnp.moveaxis(x, 1, 2).astype(like.dtype)
