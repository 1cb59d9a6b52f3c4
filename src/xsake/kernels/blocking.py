"""Arrays and lists of a call by block: cut, pad, look up, put back."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels.element_mask import TileSide
from xsake.kernels.row_loop import RowTable
from xsake.layout import BlockLayout, TransposedLayout
from xsake.layout.csr import at_least_one, namespace, partial_first


def to_blocks(x: Array, block: int, fill: int | float = 0) -> Array:
    """[B, T, H, ...] -> [B * H * (N + 1), block, ...]: each head ends with a block of `fill`.

    Rows read that block where they have no item: it is finite, whatever the arrays hold.
    """
    batch, tokens, heads = x.shape[:3]
    number = -(-tokens // block) + 1
    x = jnp.moveaxis(pad_axis(x, 1, number * block, fill), 2, 1)
    return x.reshape(batch * heads * number, block, *x.shape[3:])


def block_ranges(values: Array | None, tokens: int, block: int) -> tuple[Any, Any]:
    """Return min and max of each block, [B or 1, N]; of token indices, static, if None."""
    if values is None:
        first = np.arange(-(-tokens // block), dtype=np.int32)[None] * block
        return first, np.minimum(first + (block - 1), tokens - 1)
    values = jnp.pad(values, ((0, 0), (0, -tokens % block)), mode="edge")
    values = values.reshape(values.shape[0], -1, block)
    return values.min(-1), values.max(-1)


def from_blocks(blocks: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of `to_blocks`: [B * H * (N + 1), block, D] -> [B, T, H, D], the given shape."""
    batch, tokens, heads, dim = shape
    return jnp.moveaxis(blocks.reshape(batch, heads, -1, dim), 1, 2)[:, :tokens]


def block_index(head: Array, block: Array, blocks: int):
    """Index of a block in `to_blocks`; `block == blocks` is the one that ends the head."""
    return head * (blocks + 1) + block


def gather_blocks(x: Array, rows: Array, block: int) -> Array:
    """The blocks [rows, block, D] of rows (batch, head, block), straight from [B, T, H, D]."""
    batch, tokens, heads = x.shape[:3]
    number = -(-tokens // block)
    x = pad_axis(x, 1, number * block, 0).reshape(batch, number, block, heads, -1)
    head, index = rows // number, rows % number
    return x.at[head // heads, index, :, head % heads].get(mode="promise_in_bounds")


def empty_rows(batch: int, heads: int, blocks: int, *shape: int, dtype: Any) -> Array:
    """Zeros for one block of `shape` [block, ...] per row, as [B, N, block, H, ...]."""
    return jnp.zeros((batch, blocks, shape[0], heads, *shape[1:]), dtype)


def store_rows(buffer: Array, rows: Array, x: Array) -> Array:
    """Store the blocks `x` [rows, block, ...] in `empty_rows`; rows past the end are dropped."""
    blocks, heads = buffer.shape[1], buffer.shape[3]
    head = rows // blocks
    return buffer.at[head // heads, rows % blocks, :, head % heads].set(x, mode="drop")


def to_tokens(buffer: Array, tokens: int) -> Array:
    """[B, N, block, H, ...] -> [B, T, H, ...]."""
    return buffer.reshape(buffer.shape[0], -1, *buffer.shape[3:])[:, :tokens]


def by_kv_head(x: Array) -> Array:
    """[B, T, Hk, ...] -> [B * Hk, T, ...]."""
    return jnp.moveaxis(x, 2, 1).reshape(-1, x.shape[1], *x.shape[3:])


def from_kv_heads(x: Array, like: Array) -> Array:
    """[B * Hk, ...] -> [B, T, Hk, D], the shape and dtype of `like`; tokens after its end drop."""
    batch, tokens, heads, dim = like.shape
    x = x.reshape(batch, heads, -1, dim)[:, :, :tokens]
    return jnp.moveaxis(x, 1, 2).astype(like.dtype)


def to_chunks(x: Array, kv_heads: int, chunks: int, chunk: int) -> Array:
    """[B, Tq, Hq, ...] -> [B * Hk, chunks, chunk, G, ...], zeros after the end."""
    batch, tokens, q_heads, *rest = x.shape
    x = by_kv_head(x.reshape(batch, tokens, kv_heads, q_heads // kv_heads, *rest))
    return pad_axis(x, 1, chunks * chunk, 0).reshape(-1, chunks, chunk, *x.shape[2:])


def pairs_to_blocks(bias: Array, block_q: int, block_kv: int) -> Array:
    """[Bb, Hb, Tq, Tk] -> [Bb * Hb * Nq * Nk, block_q, block_kv]."""
    q_blocks, kv_blocks = -(-bias.shape[2] // block_q), -(-bias.shape[3] // block_kv)
    bias = pad_axis(pad_axis(bias, 2, q_blocks * block_q, 0), 3, kv_blocks * block_kv, 0)
    bias = bias.reshape(-1, q_blocks, block_q, kv_blocks, block_kv).swapaxes(2, 3)
    return bias.reshape(-1, block_q, block_kv)


def pairs_from_blocks(x: Array, shape: tuple[int, ...], q_blocks: int) -> Array:
    """The inverse of `pairs_to_blocks`."""
    batch, heads, q_tokens, kv_tokens = shape
    x = x.reshape(batch * heads, q_blocks, -1, *x.shape[1:]).swapaxes(2, 3)
    x = x.reshape(batch, heads, q_blocks * x.shape[2], -1)
    return x[:, :, :q_tokens, :kv_tokens]


def take(blocks: Array, index: Any) -> Array:
    """`blocks[index]` for indices known to be in range."""
    return blocks.at[index].get(mode="promise_in_bounds")


def pad_axis(x: Array, axis: int, size: int, fill: int | float) -> Array:
    """Pad an axis with `fill` up to `size` entries."""
    missing = size - x.shape[axis]
    if missing == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, missing)
    return jnp.pad(x, widths, constant_values=fill)


class QueryArrays(NamedTuple):
    """Arrays or refs of queries in the layout of a kernel; None where a pass needs none."""

    q: Any
    do: Any
    lse: Any
    delta: Any
    positions: Any
    segments: Any


class KeyArrays(NamedTuple):
    """Arrays or refs of keys in the layout of a kernel."""

    k: Any
    v: Any
    poison: Any  # NaN where a key is not finite, else 0; None where `k` itself has the NaN
    positions: Any
    segments: Any


class BlockLists(NamedTuple):
    """A layout's rows for every (batch, head, block) of the call; items, partial ones first."""

    rows: RowTable
    block: Any  # int32 [W]: kv block, or query block of the transposed layout
    head: Any  # int32 [W]: query head inside its kv group; None for a q-major list


def list_rows(layout: BlockLayout, batch: int, heads: int) -> BlockLists:
    """Lists of query blocks: rows (batch, query head, query block)."""
    return (_static_lists if layout.is_static else _lists)(layout, batch, heads)


def list_columns(layout: TransposedLayout, batch: int, kv_heads: int) -> BlockLists:
    """Lists of kv blocks: rows (batch, kv head, kv block)."""
    return (_static_lists if layout.is_static else _lists)(layout, batch, kv_heads)


def _lists(layout: BlockLayout | TransposedLayout, batch: int, heads: int) -> BlockLists:
    if isinstance(layout, BlockLayout):
        blocks, items = layout.q_blocks, (layout.kv_block, None)
    else:
        blocks, items = layout.kv_blocks, (layout.q_block, layout.q_head)
    xp, starts = namespace(layout.row_starts), layout.row_starts
    order, partial = partial_first(starts, layout.is_partial)

    def spread(x: Any):
        x = x.reshape(layout.batch, layout.heads, blocks)
        x = xp.repeat(x, heads // layout.heads, axis=1)
        return xp.broadcast_to(x, (batch, heads, blocks)).reshape(-1)

    full = starts[1:] - starts[:-1] - partial
    rows = RowTable(*(spread(x) for x in (starts[:-1], partial, full)))
    return BlockLists(rows, *(None if x is None else at_least_one(xp, x[order]) for x in items))


_static_lists = functools.lru_cache(maxsize=128)(_lists)


class TokenBlocks(NamedTuple):
    """Positions and segment ids of tokens by block, for the element mask."""

    positions: Any  # [B or 1, N, block]
    segments: Any  # [B, N, block] or None
    tokens: int


def token_blocks(
    positions: Array | None, segments: Array | None, tokens: int, block: int
) -> TokenBlocks:
    """Cut positions and segment ids [B or 1, T] into blocks; positions default to the index."""
    size = -(-tokens // block) * block
    if positions is None:
        positions = jnp.asarray(np.arange(size, dtype=np.int32))[None]
    positions = pad_axis(positions, 1, size, 0)
    if segments is not None:
        segments = pad_axis(segments, 1, size, -1).reshape(segments.shape[0], -1, block)
    return TokenBlocks(positions.reshape(positions.shape[0], -1, block), segments, tokens)


@dataclasses.dataclass(frozen=True, eq=False)
class RowTileSide(TileSide):
    """A block of tokens for each row of tiles [rows, ...]; integers are [B or 1, N, block]."""

    batch: Array  # int32 [rows]
    index: Array  # int32 [rows]: of the block
    axis: int  # of the tiles

    def token_index(self) -> Array:
        """See `TileSide`."""
        return self._expand(self.index[:, None] * self.block + np.arange(self.block)[None])

    def along_axis(self, integers: Array) -> Array:
        """See `TileSide`."""
        return self._expand(take(integers, (self.batch % integers.shape[0], self.index)))

    def _expand(self, x: Array) -> Array:
        return jnp.expand_dims(x, 3 - self.axis)
