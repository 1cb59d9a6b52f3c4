"""Flat numbers of blocks (batch, head, block), and the lists of a layout in these numbers.

The block is fastest. A list that several batch elements or heads share is used once for each of
these replicas, and its numbers are offset with them. `outer` is the side that owns a row of the
list, `inner` the side that its items name.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from xsake.layout.block_layout import BlockLayout
from xsake.layout.csr import counts_to_starts, item_rows, namespace
from xsake.layout.transposed import TransposedLayout
from xsake.masks import AbstractMask


class FlatItems(NamedTuple):
    """Ragged rows of block numbers: row `r` owns `row_starts[r] : row_starts[r + 1]`."""

    row_starts: Any  # int32 [R + 1]
    number: Any  # int32 [W]
    is_partial: Any  # bool [W]


@dataclasses.dataclass(frozen=True)
class RaggedGrid:
    """Sizes of a call and of its list."""

    is_kv_major: bool  # rows are kv blocks, items query blocks; else the other way round
    batch: int
    q_heads: int
    kv_heads: int
    q_blocks: int
    kv_blocks: int
    list_batch: int  # 1 if the list is shared
    list_heads: int  # likewise

    @classmethod
    def of(
        cls,
        layout: BlockLayout | TransposedLayout,
        q_shape: tuple[int, ...],
        kv_shape: tuple[int, ...],
    ) -> "RaggedGrid":
        """Return the sizes of a call with q [B, Tq, Hq, D] and k [B, Tk, Hk, D]."""
        heads, blocks = (q_shape[2], kv_shape[2]), (layout.q_blocks, layout.kv_blocks)
        is_kv_major = isinstance(layout, TransposedLayout)
        return cls(is_kv_major, q_shape[0], *heads, *blocks, layout.batch, layout.heads)

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q_heads // self.kv_heads

    @property
    def outer_heads(self) -> int:
        return self.kv_heads if self.is_kv_major else self.q_heads

    @property
    def outer_blocks(self) -> int:
        return self.kv_blocks if self.is_kv_major else self.q_blocks

    @property
    def inner_blocks(self) -> int:
        return self.q_blocks if self.is_kv_major else self.kv_blocks

    @property
    def inner_heads(self) -> int:
        return self.q_heads if self.is_kv_major else self.kv_heads

    @property
    def head_replicas(self) -> int:
        """Heads that share a list."""
        return self.outer_heads // self.list_heads

    @property
    def replicas(self) -> int:
        """Uses of the list in a call."""
        return self.batch // self.list_batch * self.head_replicas

    @property
    def rows(self) -> int:
        """Rows of the call: outer blocks."""
        return self.batch * self.outer_heads * self.outer_blocks

    def outer_number(self, row, replica):
        """Number of the outer block of a row in a replica."""
        batch, head = quotient(replica, self.head_replicas), remainder(replica, self.head_replicas)
        offset = batch * self.outer_heads * self.outer_blocks + head * self.outer_blocks
        # A row is (plane, block); between planes lie the blocks of the other heads of the replica.
        plane = quotient(row, self.outer_blocks) if self.head_replicas > 1 else 0
        return row + plane * (self.head_replicas - 1) * self.outer_blocks + offset

    def inner_offset(self, replica):
        """Offset of a replica on the numbers of a list."""
        batch, head = quotient(replica, self.head_replicas), remainder(replica, self.head_replicas)
        head = head * self.group if self.is_kv_major else quotient(head, self.group)
        return batch * self.inner_heads * self.inner_blocks + head * self.inner_blocks

    def q_and_kv(self, outer, inner):
        """An outer and an inner value as (query side, kv side)."""
        return (inner, outer) if self.is_kv_major else (outer, inner)

    def q_head(self, q_number):
        """Query head of a query block."""
        return remainder(quotient(q_number, self.q_blocks), self.q_heads)


def quotient(x, by: int):
    """`x // by` for x >= 0; a shift where it can be, for scalar units that divide slowly."""
    if by == 1:
        return x
    # `//` handles signs, and that cannot be lowered for a TPU without a device.
    return x >> (by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, by)


def remainder(x, by: int):
    """`x % by` for x >= 0."""
    if by == 1:
        return 0
    return x & (by - 1) if by & (by - 1) == 0 else x - quotient(x, by) * by


def flat_items(layout: BlockLayout | TransposedLayout, grid: RaggedGrid) -> FlatItems:
    """The list of a layout; items are numbers of inner blocks."""
    is_kv_major = isinstance(layout, TransposedLayout)
    return _items_by_key(layout, grid) if is_kv_major else _items_by_query(layout, grid)


def _items_by_query(layout: BlockLayout, grid: RaggedGrid) -> FlatItems:
    xp = namespace(layout.row_starts)
    row = item_rows(xp, layout.row_starts, layout.capacity)
    plane = xp.minimum(row, layout.rows - 1) // layout.q_blocks
    batch, head = plane // layout.heads, plane % layout.heads
    # With one list per query head, heads of a group share a kv head.
    head = head * grid.kv_heads // layout.heads if layout.heads > 1 else head
    column = xp.clip(layout.kv_block, 0, layout.kv_blocks - 1)  # traced indices are not validated
    number = (batch * grid.kv_heads + head) * layout.kv_blocks + column
    return FlatItems(layout.row_starts, number.astype(xp.int32), layout.is_partial)


def _items_by_key(layout: TransposedLayout, grid: RaggedGrid) -> FlatItems:
    """The list of kv blocks; a list that query heads share is written out for each of them."""
    xp = namespace(layout.row_starts)
    repeats = grid.group // layout.group
    row = item_rows(xp, layout.row_starts, layout.capacity)
    plane = xp.minimum(row, layout.rows - 1) // layout.kv_blocks
    batch, head = plane // layout.heads, plane % layout.heads
    member = xp.clip(layout.q_head, 0, grid.group - 1)
    column = xp.clip(layout.q_block, 0, layout.q_blocks - 1)
    number = (batch * grid.q_heads + head * grid.group + member) * layout.q_blocks + column
    number = number[:, None] + xp.arange(repeats, dtype=xp.int32)[None] * layout.q_blocks
    starts = counts_to_starts(xp, (layout.row_starts[1:] - layout.row_starts[:-1]) * repeats)
    partial = xp.repeat(layout.is_partial, repeats)
    return FlatItems(starts, number.reshape(-1).astype(xp.int32), partial)


_CHUNK = 64  # blocks evaluated at once


def build_mask_blocks(
    mask: AbstractMask,
    items: FlatItems,
    grid: RaggedGrid,
    blocks: tuple[int, int],
    keys_first: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the different element masks of a static list's partial blocks (block_q, block_kv).

    They are `(tiles int8 [P, block_q, block_kv], tile of each item int32 [W])` for tokens at
    positions 0, 1, 2, ...; tiles are transposed if `keys_first`. Full items have tile 0.
    """
    row = item_rows(np, items.row_starts, items.number.shape[0])
    used = np.flatnonzero(items.is_partial & (row < items.row_starts.shape[0] - 1))
    row, number = row[used], items.number[used]
    if grid.is_kv_major:
        head, heads = number // grid.q_blocks % grid.q_heads, grid.q_heads
    else:
        head, heads = row // grid.q_blocks % grid.list_heads, grid.list_heads
    mask_head = np.zeros_like(head) if mask.heads is None else head * mask.heads // heads
    q_block, kv_block = grid.q_and_kv(row % grid.outer_blocks, number % grid.inner_blocks)
    keys = np.stack([mask_head, q_block, kv_block], 1)
    keys, which = np.unique(keys, axis=0, return_inverse=True)

    index: dict[bytes, int] = {}
    tiles, of_key = [], np.zeros(len(keys), np.int32)
    for first in range(0, len(keys), _CHUNK):
        chunk = keys[first : first + _CHUNK]
        for at, tile in enumerate(_evaluate_blocks(mask, chunk, blocks), first):
            tile = np.ascontiguousarray(tile.T if keys_first else tile)
            of_key[at] = index.setdefault(tile.tobytes(), len(tiles))
            if of_key[at] == len(tiles):
                tiles.append(tile)
    shape = blocks[::-1] if keys_first else blocks
    numbers = np.zeros(items.number.shape[0], np.int32)
    numbers[used] = of_key[which.reshape(-1)] if len(keys) else 0
    return np.array(tiles or [np.zeros(shape, bool)], np.int8), numbers


def _evaluate_blocks(mask: AbstractMask, keys: np.ndarray, blocks: tuple[int, int]) -> np.ndarray:
    """[keys, block_q, block_kv] booleans."""
    head, q_block, kv_block = (x[:, None, None] for x in keys.T)
    q = q_block * blocks[0] + np.arange(blocks[0])[None, :, None]
    kv = kv_block * blocks[1] + np.arange(blocks[1])[None, None, :]
    with jax.ensure_compile_time_eval():  # a rule may use jnp, and the caller may be tracing
        return np.asarray(mask.allows(q, kv, None if mask.heads is None else head))
