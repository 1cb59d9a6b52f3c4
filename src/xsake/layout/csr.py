"""CSR block lists for NumPy and JAX: row starts, compaction, gathering, capacity, invariants."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from xsake.errors import LayoutError
from xsake.layout.grid import MAX_ITEMS, BlockGrid
from xsake.masks import AbstractMask, Coverage

CHUNK_ITEMS = 2**18  # items checked at once, a bound on memory


class Items(NamedTuple):
    """CSR rows of kv blocks: row `r` is `row_starts[r] : row_starts[r + 1]`."""

    row_starts: np.ndarray | jax.Array
    kv_block: np.ndarray | jax.Array
    is_partial: np.ndarray | jax.Array


def is_concrete(*arrays) -> bool:
    """Return whether none of the arrays is a tracer."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def namespace(*arrays):
    """Return `numpy` if every array is a NumPy array, else `jax.numpy`."""
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp


def freeze(owner, names: tuple[str, ...]) -> None:
    """Make NumPy arrays of a frozen object read-only."""
    for name in names:
        view = getattr(owner, name).view()
        view.flags.writeable = False
        object.__setattr__(owner, name, view)


def capacity_bucket(items: int) -> int:
    """Return the default capacity of a traced layout with `items` work items.

    Buckets are `16 * 2^k * {1, 1.25, 1.5, 1.75}`: above 16 at most 20% is unused, and layouts in
    one bucket have equal shapes and share a compiled program.

    Example:
        >>> [capacity_bucket(n) for n in (0, 16, 17, 33, 1000)]
        [16, 16, 20, 40, 1024]
    """
    if items < 0:
        raise LayoutError(
            "num-items", "the number of items is negative", got=items, expected=">= 0"
        )
    if items <= 16:
        return 16
    step = 1 << ((items - 1).bit_length() - 3)
    return -(-items // step) * step


def counts_to_starts(xp, counts):
    """Return row starts from row lengths."""
    ends = xp.cumsum(counts, dtype=xp.int32)
    return xp.concatenate([xp.zeros(1, xp.int32), ends])


def item_rows(xp, row_starts, capacity: int):
    """Return the row of each entry; the number of rows for unused entries."""
    rows = row_starts.shape[0] - 1
    if xp is np:
        owner = np.full(capacity, rows, np.int32)
        owner[: row_starts[-1]] = np.repeat(np.arange(rows, dtype=np.int32), np.diff(row_starts))
        return owner
    passed = jnp.zeros(capacity + 1, jnp.int32).at[row_starts[1:]].add(1)
    return jnp.cumsum(passed, dtype=jnp.int32)[:capacity]


def used_items(items: Items) -> tuple[Any, Any, Any]:
    """Return row, kv block and `is_partial` of the used entries of NumPy items."""
    count = int(items.row_starts[-1])
    row = item_rows(np, items.row_starts, count)
    return row, items.kv_block[:count], items.is_partial[:count]


def check_capacity(items, capacity: int) -> None:
    """Raise if items exceed the capacity; traced items are checked through `checkify`."""
    if not isinstance(capacity, int | np.integer) or capacity < 0:
        raise LayoutError(
            "capacity-argument",
            "invalid capacity",
            got=repr(capacity),
            expected="an int of at least 0",
            fix="use capacity_bucket(items)",
        )
    if not is_concrete(items):
        message = "XSK-301.capacity: {items} work items exceed the layout's capacity"
        checkify.debug_check(items <= capacity, message, items=items)
    elif int(items) > capacity:
        raise LayoutError(
            "capacity",
            "the layout exceeds its capacity",
            got=f"{int(items)} work items, capacity {capacity}",
            expected="capacity >= items",
            fix=f"use capacity={capacity_bucket(int(items))}",
        )


def compact(xp, keep, starts, capacity: int | None, *arrays):
    """Select the entries of flat `arrays` [n] where `keep` is True; `starts` [R] are those of rows.

    Returns `(row_starts [R + 1], *arrays)`, every array [capacity], zero in unused entries. The
    capacity defaults to the number of kept entries (NumPy) or n (JAX).
    """
    total = xp.cumsum(keep, dtype=xp.int32)
    before = xp.concatenate([xp.zeros(1, xp.int32), total])
    row_starts = xp.concatenate([before[starts], before[-1:]])
    if xp is np:
        kept = np.flatnonzero(keep)
        gathered = [array[kept] for array in arrays]
        if capacity is not None:
            check_capacity(row_starts[-1], capacity)
            gathered = [pad_or_truncate(np, array, capacity) for array in gathered]
        return row_starts, *gathered
    capacity = keep.shape[0] if capacity is None else capacity
    check_capacity(row_starts[-1], capacity)
    # Without checkify the list is truncated, so that the layout stays consistent.
    row_starts = jnp.minimum(row_starts, capacity)
    target = jnp.where(keep, total - 1, capacity)
    gathered = [
        jnp.zeros(capacity, array.dtype).at[target].set(array, mode="drop", unique_indices=False)
        for array in arrays
    ]
    return row_starts, *gathered


def pad_or_truncate(xp, array, capacity: int):
    """Zero-pad or truncate `array` to `capacity`."""
    missing = capacity - array.shape[0]
    if missing <= 0:
        return array[:capacity]
    return xp.concatenate([array, xp.zeros(missing, array.dtype)])


def gather_rows(xp, items: Items, row_index, capacity: int) -> Items:
    """Return a list whose row `r` is a copy of row `row_index[r]`."""
    row_index = xp.asarray(row_index)
    lengths = (items.row_starts[1:] - items.row_starts[:-1])[row_index]
    row_starts = counts_to_starts(xp, lengths)
    row = item_rows(xp, row_starts, capacity)
    owned = row < row_index.shape[0]
    row = xp.minimum(row, row_index.shape[0] - 1)
    offset = xp.arange(capacity, dtype=xp.int32) - row_starts[row]
    source = xp.where(owned, items.row_starts[row_index[row]] + offset, 0)
    kv_block, is_partial = (at_least_one(xp, array)[source] for array in items[1:])
    return Items(row_starts, xp.where(owned, kv_block, 0), owned & is_partial)


def partial_first(row_starts, is_partial):
    """Order the items so that the partial ones of each row come first.

    Returns `(order [W], num_partial [R])`: the old index at each new index, and partial items per
    row.
    """
    xp = namespace(row_starts, is_partial)
    capacity, rows = is_partial.shape[0], row_starts.shape[0] - 1
    row = item_rows(xp, row_starts, capacity)
    is_counted = is_partial & (row < rows)
    before = xp.concatenate([xp.zeros(1, xp.int32), xp.cumsum(is_counted, dtype=xp.int32)])
    num_partial = before[row_starts[1:]] - before[row_starts[:-1]]
    row = xp.minimum(row, rows - 1)
    start = row_starts[row]
    index = xp.arange(capacity, dtype=xp.int32)
    rank = before[:-1] - before[start]
    target = start + xp.where(is_counted, rank, num_partial[row] + index - start - rank)
    target = xp.where(index < row_starts[-1], target, index)
    if xp is np:
        order = np.empty(capacity, np.int32)
        order[target] = index
        return order, num_partial
    return jnp.zeros(capacity, jnp.int32).at[target].set(index, unique_indices=True), num_partial


def at_least_one(xp, x):
    """Pad an empty array to one entry, so that an empty list can be indexed."""
    return x if x.shape[0] else xp.zeros(1, x.dtype)


def check_shapes(items: Items, grid: BlockGrid, mask: AbstractMask | None) -> None:
    """Check shapes, dtypes and heads, which are known for traced layouts too."""
    shapes = tuple(tuple(array.shape) for array in items)
    dtypes = tuple(str(array.dtype) for array in items)
    describe = lambda parts: ", ".join(map("{} {}".format, items._fields, parts))
    capacity = int(np.prod(shapes[1]))
    if shapes != ((grid.rows + 1,), (capacity,), (capacity,)) or capacity > MAX_ITEMS:
        slug, what, got = (
            "shapes",
            "the arrays of the layout have incompatible shapes",
            describe(shapes),
        )
        expected = f"row_starts ({grid.rows + 1},), batch * heads * q_blocks + 1; others (W,)"
    elif dtypes != ("int32", "int32", "bool"):
        slug, what, got = "dtypes", "the arrays of the layout have wrong dtypes", describe(dtypes)
        expected = "int32, int32, bool"
    elif mask is not None and mask.heads not in (None, grid.heads):
        slug, what = "heads", "mask and layout have different numbers of heads"
        expected = "equal, or no mask heads"
        got = f"mask heads {mask.heads}, layout heads {grid.heads}"
    else:
        return
    fix = "build layouts with from_mask, from_block_mask or from_indices_counts"
    raise LayoutError(slug, what, got=got, expected=expected, fix=fix)


def check_values(items: Items, grid: BlockGrid) -> None:
    """Check row starts, order and range of kv blocks, and that overhanging ones are partial."""
    starts = items.row_starts
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any() or starts[-1] > items.kv_block.size:
        raise LayoutError(
            "row-starts",
            "invalid row_starts",
            got=f"first {starts[0]}, last {starts[-1]}, capacity {items.kv_block.size}",
            expected="0 first, non-decreasing, last at most the capacity",
        )
    listed = int(starts[-1])
    for first in range(0, listed, CHUNK_ITEMS):
        last = min(first + CHUNK_ITEMS, listed)
        block = items.kv_block[first:last]
        before = max(first, 1)
        falls = items.kv_block[before:last] <= items.kv_block[before - 1 : last - 1]
        falls = np.flatnonzero(falls) + before
        if block.min() < 0 or block.max() >= grid.kv_blocks:
            slug, what = "kv-block", "a kv block index is out of range"
            expected = f"0 to {grid.kv_blocks - 1}"
            got = f"kv blocks from {block.min()} to {block.max()}"
        elif (grid.overhangs(block) & ~items.is_partial[first:last]).any():
            slug, what = (
                "last-block",
                "the last kv block extends past kv_tokens but is listed as full",
            )
            got = f"kv_tokens {grid.kv_tokens}, block_kv {grid.block_kv}"
            expected = "is_partial for that block"
        elif not np.array_equal(starts[np.searchsorted(starts, falls)], falls):
            slug, what = "order", "the kv blocks of a row are not strictly ascending"
            got, expected = f"items {falls[:4].tolist()}, ...", "every row sorted, each block once"
        else:
            continue
        fix = "build layouts with from_mask, from_block_mask or from_indices_counts"
        raise LayoutError(slug, what, got=got, expected=expected, fix=fix)


def check_full_blocks(items: Items, grid: BlockGrid, mask: AbstractMask) -> None:
    """Check that the mask allows every pair of blocks listed as full, where it is known."""
    row, kv_block, is_partial = used_items(items)
    full = np.flatnonzero(~is_partial)
    for first in range(0, full.size, CHUNK_ITEMS):
        part = full[first : first + CHUNK_ITEMS]
        spans = grid.spans(np, grid.row_to_q_block(row[part]), kv_block[part])
        head = None if mask.heads is None else grid.row_to_head(row[part])
        codes = np.asarray(mask.coverage(*spans, head))
        if ((codes == Coverage.NONE) | (codes == Coverage.SOME)).any():
            raise LayoutError(
                "full-block",
                "a block is listed as full but the mask excludes some of its pairs",
                got=f"mask {mask!r}",
                expected="is_partial for every partly masked block",
                fix="build the layout with from_block_mask(..., mask=mask)",
            )
