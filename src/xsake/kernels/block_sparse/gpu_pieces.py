"""Cuts rows that are too long for one thread block, and sums what their pieces give.

Many rows list the first blocks of keys, so that dK/dV of these takes far longer than that of
others: the multiprocessors that got them would still be at work when all others are done.
"""

import heapq
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from xsake.kernels.block_sparse.ragged_grid import RaggedGrid
from xsake.layout.ragged import namespace, row_of_item, starts_of

# Multiprocessors of an H100: for these the work is cut, and its balance told.
CORES = 132
# Pieces that a core computes one after the other, if all were of the longest kind.
TURNS = 4
# Items of a piece, at least: what a piece begins and ends with costs about as much as one.
LEAST = 8
# The busiest core's work over the mean: below this, rows stay whole.
EVEN = 1.05


class Pieces(NamedTuple):
    """Pieces of rows, those of a row one after the other.

    rows: int32 [P]: the row of a piece; any row for a piece that has no items.
    starts, stops, middles: int32 [P]: its items, and the first one without an element mask.
    first: int32 [R + 1]: first piece of a row.
    most: of one row; 1: all rows are whole.
    """

    rows: Any
    starts: Any
    stops: Any
    middles: Any
    first: Any
    most: int


def whole(starts, middles) -> Pieces:
    """Every row is one piece."""
    xp = namespace(starts)
    rows = xp.arange(middles.shape[0], dtype=xp.int32)
    first = xp.arange(rows.shape[0] + 1, dtype=xp.int32)
    return Pieces(rows, starts[:-1], starts[1:], middles, first, 1)


def cut(starts, middles, length: int, capacity: int, longest: int) -> Pieces:
    """Pieces of about equal size, none of more than `length` items.

    Args:
        starts: int32 [R + 1], first item of a row.
        middles: int32 [R], its first item without an element mask.
        length: most items of a piece.
        capacity: most items of all rows.
        longest: most items of a row.
    """
    xp = namespace(starts)
    counts = starts[1:] - starts[:-1]
    wanted = xp.maximum(-(-counts // length), 1)
    first = starts_of(xp, wanted)
    rows, last = counts.shape[0], counts.shape[0] - 1
    # A row of c items has at most 1 + c // length pieces, whatever the rows are.
    room = int(first[-1]) if xp is np else rows + capacity // length
    owner = row_of_item(xp, first, room)
    row = xp.minimum(owner, last)
    size = -(-counts // wanted)
    begin = starts[:-1][row] + (xp.arange(room, dtype=xp.int32) - first[row]) * size[row]
    begin = xp.minimum(begin, starts[1:][row])
    end = xp.minimum(begin + size[row], starts[1:][row])
    end = xp.where(owner > last, begin, end)
    middle = xp.clip(middles[row], begin, end)
    row, begin, end, middle, first = (x.astype(xp.int32) for x in (row, begin, end, middle, first))
    most = int(wanted.max()) if xp is np else max(-(-longest // length), 1)
    return Pieces(row, begin, end, middle, first, most)


def length_of(items: int, repeats: int) -> int:
    """Most items of a piece of a list that is walked so often."""
    return max(LEAST, items * repeats // (CORES * TURNS))


def launched(pieces: Pieces) -> Any:
    """Numbers of the pieces, longest first: thread blocks start in this order."""
    xp = namespace(pieces.starts)
    return xp.argsort(pieces.starts - pieces.stops, stable=True).astype(xp.int32)


def balance(lengths: np.ndarray, repeats: int) -> float:
    """Work of the busiest core over the mean, if each core takes the next piece when it is free.

    A piece costs its items and, for what it begins and ends with, as much as one more.

    Args:
        lengths: items of the pieces, in the order in which they start.
        repeats: how often each of them is walked.
    """
    cores = [0] * CORES
    for length in lengths.tolist():
        for _ in range(repeats):
            heapq.heapreplace(cores, cores[0] + length + 1)
    return max(cores) * CORES / sum(cores)


def summed(parts, first, most: int, grid: RaggedGrid):
    """The pieces of every row added up, always in the same order.

    Args:
        parts: [P * copies, tokens, features], what a piece gave in each copy of the list.
        first: int32 [R + 1], first piece of a row.
        most: pieces of one row.
        grid: what the list's numbers mean.

    Returns:
        [B, T, H * features], T of all blocks.
    """
    parts = parts.reshape(-1, grid.copies, *parts.shape[1:])
    first, tokens, features = jnp.asarray(first, jnp.int32), *parts.shape[2:]
    number = first[:-1, None] + jnp.arange(most, dtype=jnp.int32)[None]
    is_there = (number < first[1:, None])[:, :, None, None, None]
    rows = jnp.where(is_there, parts[jnp.minimum(number, parts.shape[0] - 1)], 0).sum(1)
    planes = grid.list_batch, grid.list_heads, grid.own_blocks
    copies = grid.batch // grid.list_batch, grid.head_copies
    rows = rows.reshape(*planes, *copies, tokens, features)
    rows = rows.transpose(0, 3, 2, 5, 1, 4, 6)  # batch, its copies, block, token, head, its copies
    return rows.reshape(grid.batch, -1, grid.own_heads * features)
