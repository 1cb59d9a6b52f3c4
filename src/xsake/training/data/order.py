"""The order in which windows are read: a pure function of seed, epoch and place; holds no list."""

import hashlib
import math

import numpy as np
from jaxtyping import Int64, UInt64

ROUNDS = 4
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # finaliser of splitmix64
_LAST_SHIFT = 31


def places_to_windows(
    places: Int64[np.ndarray, " n"], *, windows: int, seed: int
) -> Int64[np.ndarray, " n"]:
    """The window that is read at each place of an endless run.

    Every `windows` places are an epoch, which reads every window once in an order of its own.
    The order is part of what a checkpoint promises, so it does not change between versions.

    Args:
        places: counted from the start of the run.
        windows: of an epoch.
        seed: other seeds give unrelated orders.

    Example:
        >>> first = places_to_windows(np.arange(5), windows=5, seed=1)
        >>> sorted(first.tolist())
        [0, 1, 2, 3, 4]
    """
    epochs, inside = np.divmod(places, windows)
    found = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        found[chosen] = shuffled(inside[chosen], size=windows, seed=seed, epoch=int(epoch))
    return found


def shuffled(
    numbers: Int64[np.ndarray, " n"], *, size: int, seed: int, epoch: int
) -> Int64[np.ndarray, " n"]:
    """Where a permutation of `range(size)` puts numbers, without making the permutation.

    A number is a row and a column of a table that just holds them all; in turn, each is moved by
    a hash of the other, which is a Feistel network. What falls behind the end of the table goes
    through it again. Takes memory for `numbers` alone.

    Args:
        numbers: below `size`.
        size: of what is permuted.
        seed: with `epoch`, names the permutation.
        epoch: with `seed`, names the permutation.
    """
    columns = math.isqrt(size - 1) + 1
    table = np.array([-(-size // columns), columns], np.uint64)
    keys = _keys(seed, epoch)
    found = _permuted(numbers.astype(np.uint64), table, keys)
    outside = np.flatnonzero(found >= size)
    while outside.size:
        found[outside] = _permuted(found[outside], table, keys)
        outside = outside[found[outside] >= size]
    return found.astype(np.int64)


def _permuted(
    numbers: UInt64[np.ndarray, " n"],
    table: UInt64[np.ndarray, " 2"],
    keys: UInt64[np.ndarray, "k 2"],
) -> UInt64[np.ndarray, " n"]:
    """A permutation of all places of a table of so many rows and columns."""
    rows, columns = table
    row, column = np.divmod(numbers, columns)
    for row_key, column_key in keys:
        column = (column + _mixed(row, column_key) % columns) % columns
        row = (row + _mixed(column, row_key) % rows) % rows
    return row * columns + column


def _mixed(numbers: UInt64[np.ndarray, " n"], key: np.uint64) -> UInt64[np.ndarray, " n"]:
    mixed = numbers + key  # wraps, as all arithmetic here
    for shift, factor in _MIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(_LAST_SHIFT))


def _keys(seed: int, epoch: int) -> UInt64[np.ndarray, "k 2"]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=ROUNDS * 2 * 8).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64).reshape(ROUNDS, 2)
