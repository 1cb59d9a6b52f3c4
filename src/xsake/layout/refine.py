"""Change block lists: intersect them with masks, expand shared ones, split or merge blocks."""

import jax.numpy as jnp
import numpy as np

from xsake.errors import LayoutError
from xsake.layout.build import CHUNK_BLOCKS, cover_items
from xsake.layout.csr import (
    Items,
    compact,
    counts_to_starts,
    gather_rows,
    item_rows,
    namespace,
    used_items,
)
from xsake.layout.grid import BlockGrid, check_int32_count
from xsake.masks import AbstractMask, Coverage
from xsake.masks.array_masks import ListedBlocks


def refine_items(xp, items: Items, codes, grid: BlockGrid) -> tuple[Items, BlockGrid]:
    """Drop items with code NONE and mark items whose code is not ALL as partial.

    Codes [B, W] with B > 1 on a shared list give one list per batch element.
    """
    capacity = items.kv_block.shape[0]
    fits = codes.ndim == 2 and codes.shape[1] == capacity
    if not fits or not (codes.shape[0] == 1 or grid.batch in (1, codes.shape[0])):
        raise LayoutError(
            "coverage-shape",
            "the coverage codes have the wrong shape",
            got=f"codes {tuple(codes.shape)}, layout batch {grid.batch}, capacity {capacity}",
            expected=f"(1, {capacity}) or (B, {capacity})",
        )
    items = Items(*(xp.asarray(array) for array in items))
    if grid.batch > 1 and codes.shape[0] > 1:
        owner = grid.row_to_batch(item_rows(xp, items.row_starts, capacity))
        owner = xp.minimum(owner, grid.batch - 1)
        codes = xp.take_along_axis(codes, owner[None, :], axis=0)
    copies = codes.shape[0]
    check_int32_count(copies * capacity)
    keep = (codes != Coverage.NONE) & (xp.arange(capacity) < items.row_starts[-1])[None, :]
    partial = items.is_partial | grid.overhangs(items.kv_block)
    partial = partial[None, :] | (codes != Coverage.ALL)
    begin = xp.arange(copies, dtype=xp.int32)[:, None] * capacity + items.row_starts[None, :-1]
    kv_block = xp.broadcast_to(items.kv_block[None, :], keep.shape)
    refined = compact(
        xp, keep.reshape(-1), begin.reshape(-1), None, kv_block.reshape(-1), partial.reshape(-1)
    )
    return Items(*refined), grid.replace(batch=grid.batch * copies)


def expand_items(items: Items, grid: BlockGrid, batch: int, heads: int) -> tuple[Items, BlockGrid]:
    """Copy a shared list to every batch element and head."""
    if grid.batch not in (1, batch) or grid.heads not in (1, heads):
        raise LayoutError(
            "expand-shared",
            "only shared lists can be expanded",
            got=f"batch {grid.batch} to {batch}, heads {grid.heads} to {heads}",
            expected="1 before, or no change",
        )
    copies = (batch // grid.batch) * (heads // grid.heads)
    capacity = items.kv_block.shape[0] * copies
    check_int32_count(capacity)
    rows = np.arange(grid.rows, dtype=np.int32).reshape(grid.batch, grid.heads, -1)
    rows = np.broadcast_to(rows, (batch, heads, grid.q_blocks)).reshape(-1)
    expanded = gather_rows(namespace(*items), items, rows, capacity)
    return expanded, grid.replace(batch=batch, heads=heads)


def coverage_codes(xp, items: Items, mask: AbstractMask, grid: BlockGrid):
    """Return the coverage of each item, [1, W]: exact in NumPy, may be UNKNOWN if traced."""
    capacity = items.kv_block.shape[0]
    row = xp.minimum(item_rows(xp, items.row_starts, capacity), grid.rows - 1)
    head = None if mask.heads is None else grid.row_to_head(row)
    if xp is np:
        kv_block = np.asarray(items.kv_block)
        return cover_items(mask, grid, grid.row_to_q_block(row), kv_block, head)[None, :]
    spans = grid.spans(xp, grid.row_to_q_block(row), items.kv_block)
    codes = mask.coverage(*spans, head)
    return jnp.broadcast_to(codes, (capacity,))[None, :]


def resize_items(
    items: Items, grid: BlockGrid, mask: AbstractMask | None, blocks: tuple[int, int]
) -> tuple[Items, BlockGrid, AbstractMask | None]:
    """Return items, grid and mask in blocks of `(block_q, block_kv)`: split first, then merge."""
    block_q, block_kv = blocks
    fine = grid.replace(
        block_q=_check_resize("block_q", grid.block_q, block_q),
        block_kv=_check_resize("block_kv", grid.block_kv, block_kv),
    )
    coarse = grid.replace(block_q=block_q, block_kv=block_kv)
    xp = namespace(*items)
    if fine != grid:
        items = split_items(xp, items, grid, fine, mask)
    if coarse == fine:
        return items, fine, mask
    if xp is not np:
        raise LayoutError(
            "merge-traced",
            "blocks of a traced layout cannot be merged",
            got=f"{grid.block_q} x {grid.block_kv} to {block_q} x {block_kv}",
            expected="a static layout, or smaller blocks",
            fix="build the layout at the larger block size",
        )
    items, mask = merge_items(items, fine, coarse, mask)
    return items, coarse, mask


def split_items(xp, items: Items, grid: BlockGrid, fine: BlockGrid, mask: AbstractMask | None):
    """Split items of `grid` into items of `fine`, whose block sizes divide those of `grid`."""
    tall, wide = grid.block_q // fine.block_q, grid.block_kv // fine.block_kv
    capacity = items.kv_block.shape[0] * tall
    check_int32_count(capacity * wide)
    row = np.arange(fine.rows, dtype=np.int32)
    parent = (row // fine.q_blocks) * grid.q_blocks + fine.row_to_q_block(row) // tall
    rows = gather_rows(xp, items, parent, capacity)
    kv_block = rows.kv_block[:, None] * wide + xp.arange(wide, dtype=xp.int32)[None, :]
    kv_block = kv_block.reshape(-1)
    whole = Items(rows.row_starts * wide, kv_block, xp.repeat(rows.is_partial, wide))
    keep = (kv_block < fine.kv_blocks) & (xp.arange(capacity * wide) < whole.row_starts[-1])
    partial = whole.is_partial
    if mask is not None:
        inside = whole._replace(kv_block=xp.minimum(kv_block, fine.kv_blocks - 1))
        codes = coverage_codes(xp, inside, mask, fine)[0]
        # All pairs of a full block are allowed, whatever the coverage codes.
        keep = keep & (~partial | (codes != Coverage.NONE))
        partial = partial & (codes != Coverage.ALL)
    else:
        partial = xp.zeros_like(partial)
    partial = partial | fine.overhangs(kv_block)
    return Items(*compact(xp, keep, whole.row_starts[:-1], None, kv_block, partial))


def merge_items(
    items: Items, grid: BlockGrid, coarse: BlockGrid, mask: AbstractMask | None
) -> tuple[Items, AbstractMask | None]:
    """Merge items of `grid` into items of `coarse`, whose block sizes are multiples."""
    tall, wide = coarse.block_q // grid.block_q, coarse.block_kv // grid.block_kv
    row, kv_block, is_partial = used_items(items)
    coarse_row = (row // grid.q_blocks) * coarse.q_blocks + grid.row_to_q_block(row) // tall
    key = coarse_row.astype(np.int64) * coarse.kv_blocks + kv_block // wide
    key, member, listed = np.unique(key, return_inverse=True, return_counts=True)
    full = np.bincount(member, weights=~is_partial, minlength=key.size).astype(np.int64)
    row_of_key, merged = np.divmod(key, coarse.kv_blocks)
    merged = merged.astype(np.int32)
    height = np.minimum(tall, grid.q_blocks - coarse.row_to_q_block(row_of_key) * tall)
    width = np.minimum(wide, grid.kv_blocks - merged * wide)
    existing = height * width
    partial = (full < existing) | coarse.overhangs(merged)
    counts = np.bincount(row_of_key, minlength=coarse.rows)
    coarse_items = Items(counts_to_starts(np, counts), merged, partial)
    incomplete = np.flatnonzero(listed < existing)
    listed_key = row.astype(np.int64) * grid.kv_blocks + kv_block
    if not _lacks_pairs(key[incomplete], listed_key, (grid, coarse), mask):
        return coarse_items, mask
    only = _explicit_mask(row, kv_block, grid)
    return coarse_items, only if mask is None else mask & only


def _lacks_pairs(keys, listed_key, grids: tuple[BlockGrid, BlockGrid], mask) -> bool:
    """Return whether a merged block has an unlisted part in which the mask allows a pair."""
    if mask is None or keys.size == 0:
        return keys.size > 0
    grid, coarse = grids
    tall, wide = coarse.block_q // grid.block_q, coarse.block_kv // grid.block_kv
    step = max(1, CHUNK_BLOCKS // (tall * wide))
    for first in range(0, keys.size, step):
        row, kv_block = np.divmod(keys[first : first + step], coarse.kv_blocks)
        q_block = coarse.row_to_q_block(row)[:, None, None] * tall + np.arange(tall)[:, None]
        kv_block = kv_block[:, None, None] * wide + np.arange(wide)
        plane = (row // coarse.q_blocks)[:, None, None]
        exists = (q_block < grid.q_blocks) & (kv_block < grid.kv_blocks)
        plane, q_block, kv_block = (
            np.broadcast_to(array, exists.shape)[exists] for array in (plane, q_block, kv_block)
        )
        candidates = (plane * grid.q_blocks + q_block) * grid.kv_blocks + kv_block
        position = np.minimum(np.searchsorted(listed_key, candidates), listed_key.size - 1)
        missing = listed_key[position] != candidates
        head = None if mask.heads is None else (plane % grid.heads)[missing]
        q_block, kv_block = (array[missing].astype(np.int32) for array in (q_block, kv_block))
        if (cover_items(mask, grid, q_block, kv_block, head) != Coverage.NONE).any():
            return True
    return False


def _explicit_mask(row, kv_block, grid: BlockGrid) -> ListedBlocks:
    if grid.batch > 1:
        raise LayoutError(
            "merge-batch-mask",
            "merging would need a mask that differs between batch elements",
            got=f"batch {grid.batch}, with unlisted blocks inside the larger ones",
            expected="a layout shared by the batch",
            fix="merge one layout per batch element, or build it at the larger block size",
        )
    chosen = np.zeros((grid.heads * grid.q_blocks, grid.kv_blocks), bool)
    chosen[row, kv_block] = True
    chosen = chosen.reshape(grid.heads, grid.q_blocks, grid.kv_blocks)
    return ListedBlocks(chosen, grid.block_q, grid.block_kv)


def _check_resize(axis: str, old: int, new: int) -> int:
    if type(new) is not int or new < 1 or (old % new and new % old):
        raise LayoutError(
            "resize",
            f"{axis} cannot be resized",
            got=f"{old} to {new!r}",
            expected="a divisor or a multiple of the old size",
        )
    return min(old, new)
