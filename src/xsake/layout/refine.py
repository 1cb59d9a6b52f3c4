"""Intersect block lists with coverage codes; expand shared lists."""

import jax.numpy as jnp
import numpy as np

from xsake.errors import LayoutError
from xsake.layout.coverage import cover_items
from xsake.layout.csr import Items, compact, gather_rows, item_rows, namespace, used_entries
from xsake.layout.grid import BlockGrid, check_int32_count
from xsake.masks import AbstractMask, Coverage


def refine_items(xp, items: Items, codes, grid: BlockGrid) -> tuple[Items, BlockGrid]:
    """Drop items with code NONE and mark items whose code is not ALL as partial.

    Args:
        codes: [batch', W]; batch' > 1 on a shared list gives one list per batch element.
    """
    capacity = items.kv_block.shape[0]
    fits = codes.ndim == 2 and codes.shape[1] == capacity
    if not fits or not (codes.shape[0] == 1 or grid.batch in (1, codes.shape[0])):
        raise LayoutError(
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
    keep = (codes != Coverage.NONE) & used_entries(xp, items.row_starts, capacity)[None, :]
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
    codes = mask.coverage(*spans, **({} if head is None else {"head": head}))
    return jnp.broadcast_to(codes, (capacity,))[None, :]
