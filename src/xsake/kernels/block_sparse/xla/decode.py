"""Forward pass for few queries: listed kv blocks are read in place from [B, T, H, D].

Cutting K and V into blocks first would copy the whole cache, however little of it is listed. Here a
row is a list of the layout for one batch element, with every head that the list serves.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels import blocking, online_softmax
from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, TileSizes
from xsake.kernels.blocking import TokenBlocks
from xsake.kernels.element_mask import ExpandedSide, element_mask, rule_of_heads
from xsake.kernels.online_softmax import isolate_nonfinite
from xsake.kernels.row_loop import RowBody, Step, loop_rows
from xsake.kernels.validation import sum_dtype

MAX_Q_BLOCKS = 4  # more of them read a block more often than one transposition of K and V costs
MAX_STEP_BLOCKS = 8  # each is a slice of its own in the program


def is_decode(inputs: BlockSparseInputs, platform: str) -> bool:
    """Whether there are few query blocks; shapes alone decide, so no batch changes the answer."""
    layout = inputs.layout
    is_few = layout.q_blocks <= MAX_Q_BLOCKS and 2 * layout.q_blocks <= layout.kv_blocks
    return platform == "cpu" and is_few


def count_forward(inputs: BlockSparseInputs, sizes: TileSizes) -> cost.KernelCost:
    """The work of `forward`."""
    walked = cost.grouped_rows(
        inputs, BlockSparseConfig(1.0, tiles=_limit(sizes)), lambda *_: sizes
    )
    return cost.blockwise(inputs, *walked, widens=True)[0]


def _limit(sizes: TileSizes) -> TileSizes:
    """One list at a time, and no more blocks in a step than the program should name."""
    return TileSizes(1, min(sizes.blocks, MAX_STEP_BLOCKS))


def forward(inputs: BlockSparseInputs, config: BlockSparseConfig, sizes: TileSizes):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    layout, reader = inputs.layout, _Reader(inputs, config)
    batch, q_tokens, q_heads, _ = inputs.q.shape
    lists = blocking.list_rows(layout, batch, layout.heads)
    first, block = jnp.asarray(lists.rows.start), jnp.asarray(lists.block)

    def prologue(rows):
        place = reader.locate(rows[0])
        state = online_softmax.init(
            reader.kv_heads, reader.repeats * reader.queries, inputs.v.shape[-1], reader.dtype
        )
        return (place, reader.load_queries(place)), state

    def lookup(rows, index, exists):
        where = jnp.minimum(blocking.take(first, rows)[:, None] + index, block.shape[0] - 1)
        return blocking.take(block, where)[0]

    def body(tile, state, shared, step: Step):
        place, q = tile
        k, v = reader.load_keys(place, step.items)
        bias = reader.load_bias(place, step.items)
        s = online_softmax.to_scores(online_softmax.dot_products(q, k), bias, config.softcap)
        if step.is_masked:
            s = jnp.where(reader.element_mask(place, step.items[0]), s, -jnp.inf)
        return online_softmax.update(state, s, v), shared

    def epilogue(rows, state, shared):
        place = reader.locate(rows[0])
        results = zip(shared, online_softmax.finalize(state), strict=True)
        return tuple(reader.store(room, place, x) for room, x in results)

    shape = batch, layout.q_blocks * reader.queries, q_heads
    out = jnp.zeros((*shape, inputs.v.shape[-1]), inputs.q.dtype)
    shared = out, jnp.zeros(shape, reader.dtype)
    row_body = RowBody(prologue, lookup, body, epilogue)
    out, lse = loop_rows(lists.rows, row_body, _limit(sizes), shared)
    return out[:, :q_tokens], lse[:, :q_tokens]


@dataclasses.dataclass(frozen=True)
class _ListCoords:
    """Batch element, first query head and query block of a list."""

    batch: jnp.ndarray
    head: jnp.ndarray
    block: jnp.ndarray


class _Reader:
    """The arrays of a call, cut for one list: [kv heads, repeats * queries, ...]."""

    def __init__(self, inputs: BlockSparseInputs, config: BlockSparseConfig):
        layout = inputs.layout
        self.inputs, self.config, self.layout = inputs, config, layout
        self.dtype = sum_dtype(inputs.q.dtype)
        self.heads = inputs.q.shape[2] // layout.heads
        self.kv_heads = max(1, inputs.k.shape[2] // layout.heads)
        self.repeats = self.heads // self.kv_heads
        one_block = layout.q_blocks == 1
        self.queries = inputs.q.shape[1] if one_block else layout.block_q

    def locate(self, row) -> _ListCoords:
        blocks, heads = self.layout.q_blocks, self.layout.heads
        return _ListCoords(
            row // (heads * blocks), row // blocks % heads * self.heads, row % blocks
        )

    def load_queries(self, place: _ListCoords):
        q = self._slice_queries(self.inputs.q, 1, place)
        factor = online_softmax.query_factor(self.config.scale, self.config.softcap)
        q = q.astype(self.dtype) * jnp.asarray(factor, self.dtype)
        return self._fold(jnp.moveaxis(q, 1, 2))

    def load_keys(self, place: _ListCoords, blocks):
        """K and V of some blocks, each [kv heads, keys, D]; NaN marks keys to refuse."""
        q_heads, kv_heads = self.inputs.q.shape[2], self.inputs.k.shape[2]
        head = place.head * kv_heads // q_heads
        sizes = 1, self.layout.block_kv, self.kv_heads

        def load(x):
            starts = [(place.batch, self._first(block), head, 0) for block in blocks]
            parts = [lax.dynamic_slice(x, start, (*sizes, x.shape[-1])) for start in starts]
            return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1)

        k, v = isolate_nonfinite(load(self.inputs.k), load(self.inputs.v))
        turn = lambda x: x[0].swapaxes(0, 1)
        return turn(k).astype(self.dtype), turn(v).astype(self.dtype)

    def load_bias(self, place: _ListCoords, blocks):
        """The bias of some blocks, or None."""
        bias = self.inputs.bias
        if bias is None:
            return None
        rows, keys = self._slice_queries(bias, 2, place), self.layout.block_kv
        parts = [lax.dynamic_slice_in_dim(rows, self._first(block), keys, 3) for block in blocks]
        return self._fold(jnp.concatenate(parts, 3).astype(self.dtype))

    def element_mask(self, place: _ListCoords, block: Array) -> Array:
        """The element mask of a block."""
        inputs, first = self.inputs, self._first(block)
        heads = lambda: place.head + jnp.arange(self.heads, dtype=jnp.int32)[None, :, None, None]
        allows = rule_of_heads(self.layout.mask, inputs.q.shape[2], heads)
        q = self._side(inputs.q_positions, inputs.q_segment_ids, self._query_integers, place)
        at = functools.partial(self._key_integers, first=first)
        kv = self._side(inputs.kv_positions, inputs.kv_segment_ids, at, place)
        token = first + jnp.arange(self.layout.block_kv, dtype=jnp.int32)
        # A slice that would end past the array starts earlier: those keys belong to another block.
        own = (token >= block * self.layout.block_kv)[None, None, None]
        allowed = element_mask(q, kv, allows)
        return self._fold(own if allowed is None else own & allowed)

    def _side(
        self, positions: Any, segments: Any, load: Callable[..., Array], place: _ListCoords
    ) -> ExpandedSide:
        segments = None if segments is None else load(segments, place)
        return ExpandedSide(TokenBlocks(load(positions, place), segments, 1), 1, 1)

    def store(self, room, place: _ListCoords, x):
        """Put the results of a list [kv heads, repeats * queries, ...] in their place."""
        x = x.reshape(1, self.heads, self.queries, *x.shape[2:]).swapaxes(1, 2)
        start = place.batch, place.block * self.queries, place.head, *(0,) * (x.ndim - 3)
        return lax.dynamic_update_slice(room, x.astype(room.dtype), start)

    def _first(self, block):
        """First key of the slice that holds a block and lies inside the array."""
        keys = self.layout.block_kv
        return jnp.minimum(block * keys, self.inputs.k.shape[1] - keys)

    def _slice_queries(self, x, axis: int, place: _ListCoords):
        """The queries of a list from `x`, whose tokens are at `axis`; heads are at 3 - `axis`."""
        x = blocking.pad_axis(x, axis, self.layout.q_blocks * self.queries, 0)
        cuts = {
            0: (place.batch, 1),
            axis: (place.block * self.queries, self.queries),
            3 - axis: (place.head, self.heads),
        }
        for own, (first, number) in cuts.items():
            if number < x.shape[own]:
                x = lax.dynamic_slice_in_dim(x, first, number, own)
        return x

    def _slice_integers(self, x, place: _ListCoords, tokens: int, first, number: int):
        """Positions or segment ids [1, number] of a list, from token `first` on."""
        if x is None:
            return first + jnp.arange(number, dtype=jnp.int32)[None]
        x = blocking.pad_axis(x, 1, tokens, 0)
        batch = place.batch if x.shape[0] > 1 else 0
        return lax.dynamic_slice(x, (batch, first), (1, number))

    def _query_integers(self, x, place: _ListCoords):
        tokens = self.layout.q_blocks * self.queries
        x = self._slice_integers(x, place, tokens, place.block * self.queries, self.queries)
        return x[:, None, :, None]

    def _key_integers(self, x, place: _ListCoords, first):
        x = self._slice_integers(x, place, self.inputs.k.shape[1], first, self.layout.block_kv)
        return x[:, None, None, :]

    def _fold(self, x):
        """[1, heads or 1, queries or 1, n] -> [kv heads, repeats * queries, n]."""
        x = jnp.broadcast_to(x, (1, self.heads, self.queries, x.shape[-1]))
        return x.reshape(self.kv_heads, self.repeats * self.queries, x.shape[-1])
