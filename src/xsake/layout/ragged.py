"""Arithmetic on ragged rows, written once for NumPy and JAX; knows no masks and no block sizes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from xsake.errors import LayoutError


class Items(NamedTuple):
    """Rows of kv blocks: row `r` owns the entries `row_starts[r] : row_starts[r + 1]`."""

    row_starts: np.ndarray | jax.Array
    kv_block: np.ndarray | jax.Array
    is_partial: np.ndarray | jax.Array


def is_concrete(*arrays) -> bool:
    """Whether the values can be read now, which a tracer's cannot."""
    return not any(isinstance(array, jax.core.Tracer) for array in arrays)


def namespace(*arrays):
    """`numpy` if every array is NumPy's, else `jax.numpy`."""
    return np if all(isinstance(array, np.ndarray) for array in arrays) else jnp


def freeze(owner, names: tuple[str, ...]) -> None:
    """Make NumPy arrays of a frozen object read-only: layouts are cached and shared."""
    for name in names:
        view = getattr(owner, name).view()
        view.flags.writeable = False
        object.__setattr__(owner, name, view)


def capacity_bucket(items: int) -> int:
    """The capacity that a traced layout of `items` work items is given.

    Capacities are `16 * 2^k * {1, 1.25, 1.5, 1.75}`: above 16 at most a fifth is unused, and every
    budget inside one bucket has the same shapes, so nothing is compiled again.

    Args:
        items: number of work items, at least 0.

    Returns:
        The smallest bucket that holds them.

    Example:
        >>> [capacity_bucket(n) for n in (0, 16, 17, 33, 1000)]
        [16, 16, 20, 40, 1024]
    """
    if items < 0:
        raise LayoutError("a layout cannot have fewer than 0 items", got=items, expected=">= 0")
    if items <= 16:
        return 16
    step = 1 << ((items - 1).bit_length() - 3)
    return -(-items // step) * step


def starts_of(xp, counts):
    """Row starts from row lengths."""
    ends = xp.cumsum(counts, dtype=xp.int32)
    return xp.concatenate([xp.zeros(1, xp.int32), ends])


def row_of_item(xp, row_starts, capacity: int):
    """The row that owns each entry; the number of rows for entries that nobody owns."""
    rows = row_starts.shape[0] - 1
    if xp is np:
        owner = np.full(capacity, rows, np.int32)
        owner[: row_starts[-1]] = np.repeat(np.arange(rows, dtype=np.int32), np.diff(row_starts))
        return owner
    passed = jnp.zeros(capacity + 1, jnp.int32).at[row_starts[1:]].add(1)
    return jnp.cumsum(passed, dtype=jnp.int32)[:capacity]


def used(xp, row_starts, capacity: int):
    """Which entries belong to a row."""
    return xp.arange(capacity, dtype=xp.int32) < row_starts[-1]


def require_room(items, capacity: int, concrete: bool) -> None:
    """Refuse to drop work: now if `items` can be read, through `checkify` if it is traced."""
    if not isinstance(capacity, int | np.integer) or capacity < 0:
        raise LayoutError(
            "capacity must be a number of items",
            got=repr(capacity),
            expected="an int of at least 0",
            fix="capacity_bucket(items) gives the usual one",
        )
    if concrete:
        if int(items) > capacity:
            raise LayoutError(
                "the layout does not fit its capacity",
                got=f"{int(items)} work items, capacity {capacity}",
                expected="capacity >= items",
                fix=f"use capacity={capacity_bucket(int(items))}, the bucket of this layout",
            )
        return
    checkify.debug_check(
        items <= capacity,
        "XSK-301: {items} work items do not fit the layout's capacity",
        items=items,
    )


def compact(xp, keep, starts, capacity: int | None, *arrays):
    """Close the gaps: entries of flat `arrays` where `keep` holds, and their row starts.

    Args:
        keep: bool [n], entries that stay; unowned entries must be False.
        starts: int [R], where each row began among the n entries.
        capacity: entries to make room for; None keeps exactly what is there (NumPy) or n (JAX).

    Returns:
        `(row_starts[R + 1], *arrays)`, every array [capacity], zero where nobody owns the entry.
    """
    total = xp.cumsum(keep, dtype=xp.int32)
    before = xp.concatenate([xp.zeros(1, xp.int32), total])
    row_starts = xp.concatenate([before[starts], before[-1:]])
    if xp is np:
        kept = np.flatnonzero(keep)
        taken = [array[kept] for array in arrays]
        if capacity is not None:
            require_room(row_starts[-1], capacity, True)
            taken = [pad(np, array, capacity) for array in taken]
        return row_starts, *taken
    capacity = keep.shape[0] if capacity is None else capacity
    require_room(row_starts[-1], capacity, is_concrete(row_starts))
    # A checked program stops above; any other keeps the layout consistent by cutting the list.
    row_starts = jnp.minimum(row_starts, capacity)
    target = jnp.where(keep, total - 1, capacity)
    taken = [
        jnp.zeros(capacity, array.dtype).at[target].set(array, mode="drop", unique_indices=False)
        for array in arrays
    ]
    return row_starts, *taken


def pad(xp, array, capacity: int):
    """`array` with zeros up to `capacity`, or cut there."""
    short = capacity - array.shape[0]
    if short <= 0:
        return array[:capacity]
    return xp.concatenate([array, xp.zeros(short, array.dtype)])


def gather_rows(xp, items: Items, row_index, capacity: int) -> Items:
    """A list whose row `r` is a copy of row `row_index[r]`."""
    row_index = xp.asarray(row_index)
    lengths = (items.row_starts[1:] - items.row_starts[:-1])[row_index]
    row_starts = starts_of(xp, lengths)
    row = row_of_item(xp, row_starts, capacity)
    owned = row < row_index.shape[0]
    row = xp.minimum(row, row_index.shape[0] - 1)
    offset = xp.arange(capacity, dtype=xp.int32) - row_starts[row]
    source = xp.where(owned, items.row_starts[row_index[row]] + offset, 0)
    if items.kv_block.shape[0] == 0:
        return Items(row_starts, xp.zeros(capacity, xp.int32), xp.zeros(capacity, bool))
    return Items(
        row_starts,
        xp.where(owned, items.kv_block[source], 0),
        owned & items.is_partial[source],
    )
