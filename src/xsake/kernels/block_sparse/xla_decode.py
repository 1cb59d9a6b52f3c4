"""Forward pass for few queries: listed kv blocks are read where they lie in [B, T, H, D].

Cutting K and V into blocks first would move the whole cache, however little of it is listed. Here a
row is a list of the layout for one batch element, with every head that the list serves.
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse import blocked, cost, tiles
from xsake.kernels.block_sparse.problem import (
    Operands,
    Problem,
    TileSizes,
    compute_dtype,
    quarantine,
)
from xsake.kernels.block_sparse.walk import Step, Visitor, walk

MAX_Q_BLOCKS = 4  # more of them read a block more often than one transposition of K and V costs
MAX_STEP_BLOCKS = 8  # each is a slice of its own in the program


def is_decode(operands: Operands, platform: str) -> bool:
    """Whether there are few query blocks; shapes alone decide, so no batch changes the answer."""
    layout = operands.layout
    is_few = layout.q_blocks <= MAX_Q_BLOCKS and 2 * layout.q_blocks <= layout.kv_blocks
    return platform == "cpu" and is_few


def count_forward(operands: Operands, sizes: TileSizes) -> cost.Pass:
    """The work of `forward`."""
    walked = cost.grouped_rows(operands, Problem(1.0, tiles=_limit(sizes)), lambda *_: sizes)
    return cost.blockwise(operands, *walked, widens=True)[0]


def _limit(sizes: TileSizes) -> TileSizes:
    """One list at a time, and no more blocks in a step than the program should name."""
    return TileSizes(1, min(sizes.blocks, MAX_STEP_BLOCKS))


def forward(operands: Operands, problem: Problem, sizes: TileSizes):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    layout, reader = operands.layout, _Reader(operands, problem)
    batch, q_tokens, q_heads, _ = operands.q.shape
    lists = blocked.row_lists(layout, batch, layout.heads)
    first, block = jnp.asarray(lists.rows.start), jnp.asarray(lists.block)

    def begin(rows):
        place = reader.locate(rows[0])
        state = tiles.empty_softmax(
            reader.kv_heads,
            reader.repeats * reader.queries,
            operands.v.shape[-1],
            reader.dtype,
        )
        return (place, reader.load_queries(place)), state

    def fetch(rows, turns, exists):
        where = jnp.minimum(blocked.take(first, rows)[:, None] + turns, block.shape[0] - 1)
        return blocked.take(block, where)[0]

    def visit(tile, state, shared, step: Step):
        place, q = tile
        k, v = reader.load_keys(place, step.items)
        bias = reader.load_bias(place, step.items)
        s = tiles.logits(tiles.products(q, k), bias, problem.softcap)
        if step.masked:
            s = jnp.where(reader.visible(place, step.items[0]), s, -jnp.inf)
        return tiles.accumulate(state, s, v), shared

    def finish(rows, state, shared):
        place = reader.locate(rows[0])
        results = zip(shared, tiles.settle(state), strict=True)
        return tuple(reader.store(room, place, x) for room, x in results)

    shape = batch, layout.q_blocks * reader.queries, q_heads
    out = jnp.zeros((*shape, operands.v.shape[-1]), operands.q.dtype)
    shared = out, jnp.zeros(shape, reader.dtype)
    visitor = Visitor(begin, fetch, visit, finish)
    out, lse = walk(lists.rows, visitor, _limit(sizes), shared)
    return out[:, :q_tokens], lse[:, :q_tokens]


@dataclasses.dataclass(frozen=True)
class _Place:
    """Batch element, first query head and query block of a list."""

    batch: jnp.ndarray
    head: jnp.ndarray
    block: jnp.ndarray


class _Reader:
    """The arrays of a call, cut for one list: [kv heads, repeats * queries, ...]."""

    def __init__(self, operands: Operands, problem: Problem):
        layout = operands.layout
        self.operands, self.problem, self.layout = operands, problem, layout
        self.dtype = compute_dtype(operands)
        self.heads = operands.q.shape[2] // layout.heads
        self.kv_heads = max(1, operands.k.shape[2] // layout.heads)
        self.repeats = self.heads // self.kv_heads
        one_block = layout.q_blocks == 1
        self.queries = operands.q.shape[1] if one_block else layout.block_q

    def locate(self, row) -> _Place:
        blocks, heads = self.layout.q_blocks, self.layout.heads
        return _Place(row // (heads * blocks), row // blocks % heads * self.heads, row % blocks)

    def load_queries(self, place: _Place):
        q = self._slice_queries(self.operands.q, 1, place)
        factor = tiles.query_factor(self.problem.scale, self.problem.softcap)
        q = q.astype(self.dtype) * jnp.asarray(factor, self.dtype)
        return self._fold(jnp.moveaxis(q, 1, 2))

    def load_keys(self, place: _Place, blocks):
        """K and V of some blocks, each [kv heads, keys, D]; NaN marks keys to refuse."""
        q_heads, kv_heads = self.operands.q.shape[2], self.operands.k.shape[2]
        head = place.head * kv_heads // q_heads
        sizes = 1, self.layout.block_kv, self.kv_heads

        def load(x):
            starts = [(place.batch, self._first(block), head, 0) for block in blocks]
            parts = [lax.dynamic_slice(x, start, (*sizes, x.shape[-1])) for start in starts]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)

        k, v = quarantine(load(self.operands.k), load(self.operands.v))
        turn = lambda x: x[0].swapaxes(0, 1)
        return turn(k).astype(self.dtype), turn(v).astype(self.dtype)

    def load_bias(self, place: _Place, blocks):
        """The bias of some blocks, or None."""
        bias = self.operands.bias
        if bias is None:
            return None
        rows, keys = self._slice_queries(bias, 2, place), self.layout.block_kv
        parts = [lax.dynamic_slice_in_dim(rows, self._first(block), keys, 3) for block in blocks]
        return self._fold(jnp.concatenate(parts, 3).astype(self.dtype))

    def visible(self, place: _Place, block):
        """The element mask of a block."""
        operands, mask = self.operands, self.layout.mask
        first = self._first(block)
        token = first + jnp.arange(self.layout.block_kv, dtype=jnp.int32)
        # A slice that would end past the array starts earlier: those keys belong to another block.
        visible = (token >= block * self.layout.block_kv)[None, None, None]
        if mask is not None:
            which = None
            if mask.heads is not None:
                which = place.head + jnp.arange(self.heads, dtype=jnp.int32)[None, :, None, None]
                which = which * mask.heads // operands.q.shape[2]
            q_pos = self._query_integers(operands.q_positions, place)
            kv_pos = self._key_integers(operands.kv_positions, place, first)
            visible = visible & mask.allows(q_pos, kv_pos, which)
        if operands.q_segment_ids is not None:
            q_ids = self._query_integers(operands.q_segment_ids, place)
            kv_ids = self._key_integers(operands.kv_segment_ids, place, first)
            visible = visible & (q_ids == kv_ids) & (q_ids >= 0)
        return self._fold(visible)

    def store(self, room, place: _Place, x):
        """Put the results of a list [kv heads, repeats * queries, ...] in their place."""
        x = x.reshape(1, self.heads, self.queries, *x.shape[2:]).swapaxes(1, 2)
        start = place.batch, place.block * self.queries, place.head, *(0,) * (x.ndim - 3)
        return lax.dynamic_update_slice(room, x.astype(room.dtype), start)

    def _first(self, block):
        """First key of the slice that holds a block and lies inside the array."""
        keys = self.layout.block_kv
        return jnp.minimum(block * keys, self.operands.k.shape[1] - keys)

    def _slice_queries(self, x, axis: int, place: _Place):
        """The queries of a list from `x`, whose tokens are at `axis`; heads are at 3 - `axis`."""
        x = blocked.pad_axis(x, axis, self.layout.q_blocks * self.queries, 0)
        cuts = {
            0: (place.batch, 1),
            axis: (place.block * self.queries, self.queries),
            3 - axis: (place.head, self.heads),
        }
        for own, (first, number) in cuts.items():
            if number < x.shape[own]:
                x = lax.dynamic_slice_in_dim(x, first, number, own)
        return x

    def _slice_integers(self, x, place: _Place, tokens: int, first, number: int):
        """Positions or segment ids [1, number] of a list, from token `first` on."""
        if x is None:
            return first + jnp.arange(number, dtype=jnp.int32)[None]
        x = blocked.pad_axis(x, 1, tokens, 0)
        batch = place.batch if x.shape[0] > 1 else 0
        return lax.dynamic_slice(x, (batch, first), (1, number))

    def _query_integers(self, x, place: _Place):
        tokens = self.layout.q_blocks * self.queries
        x = self._slice_integers(x, place, tokens, place.block * self.queries, self.queries)
        return x[:, None, :, None]

    def _key_integers(self, x, place: _Place, first):
        x = self._slice_integers(x, place, self.operands.k.shape[1], first, self.layout.block_kv)
        return x[:, None, None, :]

    def _fold(self, x):
        """[1, heads or 1, queries or 1, n] -> [kv heads, repeats * queries, n]."""
        x = jnp.broadcast_to(x, (1, self.heads, self.queries, x.shape[-1]))
        return x.reshape(self.kv_heads, self.repeats * self.queries, x.shape[-1])
