"""Split-K of long rows: rows become pieces, whose partial sums are added.

Many rows list the first blocks of keys, so dkv of these takes far longer than of others, and the
multiprocessors that compute them would finish long after the rest.
"""

import heapq
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.layout.csr import counts_to_starts, item_rows, namespace
from xsake.layout.numbering import RaggedGrid

# Multiprocessors of an H100, for which rows are split.
CORES = 132
# Pieces per core, if all were of maximum length.
PIECES_PER_CORE = 4
# Minimum items of a piece: its prologue and epilogue cost about as much as one item.
MIN_LENGTH = 8
# The busiest core's work over the mean: below this, rows stay whole.
EVEN = 1.05


class Pieces(NamedTuple):
    """Pieces of rows, those of a row one after the other.

    rows: int32 [P]: the row of a piece; any row for a piece that has no items.
    starts, stops, first_unmasked: int32 [P]: its items, and the first one without an element mask.
    first: int32 [R + 1]: first piece of a row.
    max_of_row: pieces of one row; 1: all rows are whole.
    """

    rows: Any
    starts: Any
    stops: Any
    first_unmasked: Any
    first: Any
    max_of_row: int


def keep_rows(starts: Any, first_unmasked: Any) -> Pieces:
    """Every row is one piece."""
    xp = namespace(starts)
    rows = xp.arange(first_unmasked.shape[0], dtype=xp.int32)
    first = xp.arange(rows.shape[0] + 1, dtype=xp.int32)
    return Pieces(rows, starts[:-1], starts[1:], first_unmasked, first, 1)


def split(starts: Any, first_unmasked: Any, length: int, capacity: int, longest: int) -> Pieces:
    """Split rows into pieces of about equal size, none of more than `length` items.

    `starts` [R + 1] and `first_unmasked` [R] are items; all rows have at most `capacity` of them,
    one row at most `longest`.
    """
    xp = namespace(starts)
    counts = starts[1:] - starts[:-1]
    number = xp.maximum(-(-counts // length), 1)
    first = counts_to_starts(xp, number)
    rows, last = counts.shape[0], counts.shape[0] - 1
    # A row of c items has at most 1 + c // length pieces, whatever the rows are.
    capacity = int(first[-1]) if xp is np else rows + capacity // length
    owner = item_rows(xp, first, capacity)
    row = xp.minimum(owner, last)
    size = -(-counts // number)
    begin = starts[:-1][row] + (xp.arange(capacity, dtype=xp.int32) - first[row]) * size[row]
    begin = xp.minimum(begin, starts[1:][row])
    end = xp.minimum(begin + size[row], starts[1:][row])
    end = xp.where(owner > last, begin, end)
    middle = xp.clip(first_unmasked[row], begin, end)
    row, begin, end, middle, first = (x.astype(xp.int32) for x in (row, begin, end, middle, first))
    most = int(number.max()) if xp is np else max(-(-longest // length), 1)
    return Pieces(row, begin, end, middle, first, most)


def max_length(items: int, repeats: int) -> int:
    """Maximum items of a piece of a list that is used `repeats` times."""
    return max(MIN_LENGTH, items * repeats // (CORES * PIECES_PER_CORE))


def launch_order(pieces: Pieces) -> Any:
    """Indices of the pieces, longest first: thread blocks start in this order."""
    xp = namespace(pieces.starts)
    return xp.argsort(pieces.starts - pieces.stops, stable=True).astype(xp.int32)


def balance(lengths: np.ndarray, repeats: int) -> float:
    """Work of the busiest core over the mean, if each core takes the next piece when it is free.

    `lengths` are items of pieces in the order in which they start, each `repeats` times. A piece
    costs its items and one more for its prologue and epilogue.
    """
    cores = [0] * CORES
    for length in lengths.tolist():
        for _ in range(repeats):
            heapq.heapreplace(cores, cores[0] + length + 1)
    return max(cores) * CORES / sum(cores)


def sum_pieces(parts: Array, first: Any, max_pieces: int, grid: RaggedGrid):
    """Sum the pieces [P * replicas, tokens, features] of every row, always in the same order.

    Row `r` has the pieces from `first[r]` on. Returns [B, T, H * features], T of all blocks.
    """
    parts = parts.reshape(-1, grid.replicas, *parts.shape[1:])
    first, tokens, features = jnp.asarray(first, jnp.int32), *parts.shape[2:]
    number = first[:-1, None] + jnp.arange(max_pieces, dtype=jnp.int32)[None]
    exists = (number < first[1:, None])[:, :, None, None, None]
    rows = jnp.where(exists, parts[jnp.minimum(number, parts.shape[0] - 1)], 0).sum(1)
    planes = grid.list_batch, grid.list_heads, grid.outer_blocks
    replicas = grid.batch // grid.list_batch, grid.head_replicas
    rows = rows.reshape(*planes, *replicas, tokens, features)
    rows = rows.transpose(0, 3, 2, 5, 1, 4, 6)  # (batch, replica), (block, token), (head, replica)
    return rows.reshape(grid.batch, -1, grid.outer_heads * features)
