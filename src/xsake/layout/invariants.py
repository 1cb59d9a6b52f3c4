"""Layout invariants, checked in bounded memory."""

import numpy as np

from xsake.errors import LayoutError
from xsake.layout.csr import Items, item_rows
from xsake.layout.grid import MAX_ITEMS, BlockGrid
from xsake.masks import AbstractMask, Coverage

CHUNK_ITEMS = 2**18


def check_shapes(items: Items, grid: BlockGrid, mask: AbstractMask | None) -> None:
    """Check shapes, dtypes and heads, which are known for traced layouts too."""
    shapes = tuple(tuple(array.shape) for array in items)
    capacity = int(np.prod(shapes[1]))
    if shapes != ((grid.rows + 1,), (capacity,), (capacity,)) or capacity > MAX_ITEMS:
        raise LayoutError(
            "the arrays of the layout have incompatible shapes",
            got=f"row_starts {shapes[0]}, kv_block {shapes[1]}, is_partial {shapes[2]}",
            expected=f"row_starts ({grid.rows + 1},), batch * heads * q_blocks + 1; others (W,)",
            fix="build layouts with from_mask, from_block_mask or from_indices_counts",
        )
    dtypes = tuple(str(array.dtype) for array in items)
    if dtypes != ("int32", "int32", "bool"):
        raise LayoutError(
            "the arrays of the layout have wrong dtypes",
            got=f"row_starts {dtypes[0]}, kv_block {dtypes[1]}, is_partial {dtypes[2]}",
            expected="int32, int32, bool",
        )
    if mask is not None and mask.heads not in (None, grid.heads):
        raise LayoutError(
            "mask and layout have different numbers of heads",
            got=f"mask heads {mask.heads}, layout heads {grid.heads}",
            expected="equal, or a mask without heads",
        )


def check_values(items: Items, grid: BlockGrid) -> None:
    """Check row starts, order and range of kv blocks, and that overhanging ones are partial."""
    starts = items.row_starts
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any() or starts[-1] > items.kv_block.size:
        raise LayoutError(
            "invalid row_starts",
            got=f"first {starts[0]}, last {starts[-1]}, capacity {items.kv_block.size}",
            expected="0 first, non-decreasing, last at most the capacity",
        )
    listed = int(starts[-1])
    for first in range(0, listed, CHUNK_ITEMS):
        last = min(first + CHUNK_ITEMS, listed)
        block = items.kv_block[first:last]
        if block.min() < 0 or block.max() >= grid.kv_blocks:
            raise LayoutError(
                "a kv block index is out of range",
                got=f"kv blocks from {block.min()} to {block.max()}",
                expected=f"0 to {grid.kv_blocks - 1}",
            )
        if (grid.overhangs(block) & ~items.is_partial[first:last]).any():
            raise LayoutError(
                "the last kv block extends past kv_tokens but is listed as full",
                got=f"kv_tokens {grid.kv_tokens}, block_kv {grid.block_kv}",
                expected="is_partial for that block",
            )
        before = max(first, 1)
        falls = items.kv_block[before:last] <= items.kv_block[before - 1 : last - 1]
        falls = np.flatnonzero(falls) + before
        if not np.array_equal(starts[np.searchsorted(starts, falls)], falls):
            raise LayoutError(
                "the kv blocks of a row are not strictly ascending",
                expected="every row sorted, each kv block once",
                fix="from_indices_counts sorts rows",
            )


def check_full_blocks(items: Items, grid: BlockGrid, mask: AbstractMask) -> None:
    """Check that the mask allows every pair of blocks listed as full, where it is known."""
    row = item_rows(np, items.row_starts, items.kv_block.size)
    full = np.flatnonzero(~items.is_partial[: items.row_starts[-1]])
    for first in range(0, full.size, CHUNK_ITEMS):
        part = full[first : first + CHUNK_ITEMS]
        spans = grid.spans(np, grid.row_to_q_block(row[part]), items.kv_block[part])
        head = {} if mask.heads is None else {"head": grid.row_to_head(row[part])}
        codes = np.asarray(mask.coverage(*spans, **head))
        if ((codes == Coverage.NONE) | (codes == Coverage.SOME)).any():
            raise LayoutError(
                "a block is listed as full but the mask excludes some of its pairs",
                got=f"mask {mask!r}",
                expected="is_partial for every partly masked block",
                fix="build the layout with from_block_mask(..., mask=mask)",
            )
