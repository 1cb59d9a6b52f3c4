"""Shuffle of windows as a pure function of seed, epoch and position; no stored permutation."""

import hashlib
import math

import numpy as np
from jaxtyping import Int64, UInt64

ROUNDS = 4
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # finalizer of splitmix64
_LAST_SHIFT = 31


def positions_to_windows(
    positions: Int64[np.ndarray, " n"], *, windows: int, seed: int
) -> Int64[np.ndarray, " n"]:
    """Return the window at each position of an endless run.

    Every `windows` positions are an epoch, which reads every window once in a new order. The order
    is part of the checkpoint format and does not change between versions.

    Args:
        positions: from the start of the run.
        windows: per epoch.
        seed: of the shuffle.

    Example:
        >>> first = positions_to_windows(np.arange(5), windows=5, seed=1)
        >>> sorted(first.tolist())
        [0, 1, 2, 3, 4]
    """
    epochs, offsets = np.divmod(positions, windows)
    permuted = np.empty_like(positions)
    for epoch in np.unique(epochs):
        is_epoch = epochs == epoch
        permuted[is_epoch] = permute(offsets[is_epoch], size=windows, seed=seed, epoch=int(epoch))
    return permuted


def permute(
    indices: Int64[np.ndarray, " n"], *, size: int, seed: int, epoch: int
) -> Int64[np.ndarray, " n"]:
    """Apply a permutation of `range(size)` to indices, without storing the permutation.

    An index is a row and a column of the smallest table that holds all of them. In turn, each is
    shifted by a hash of the other (a Feistel network). Results beyond `size` are permuted again.
    Needs memory for `indices` only.

    Args:
        indices: below `size`.
        size: of the permutation.
        seed: with `epoch`, selects the permutation.
        epoch: with `seed`, selects the permutation.
    """
    columns = math.isqrt(size - 1) + 1
    table = np.array([-(-size // columns), columns], np.uint64)
    keys = _keys(seed, epoch)
    permuted = _permute_table(indices.astype(np.uint64), table, keys)
    outside = np.flatnonzero(permuted >= size)
    while outside.size:
        permuted[outside] = _permute_table(permuted[outside], table, keys)
        outside = outside[permuted[outside] >= size]
    return permuted.astype(np.int64)


def _permute_table(
    indices: UInt64[np.ndarray, " n"],
    table: UInt64[np.ndarray, " 2"],
    keys: UInt64[np.ndarray, "k 2"],
) -> UInt64[np.ndarray, " n"]:
    """Permute all cells of a table; `table` holds its numbers of rows and columns."""
    rows, columns = table
    row, column = np.divmod(indices, columns)
    for row_key, column_key in keys:
        column = (column + _mix(row, column_key) % columns) % columns
        row = (row + _mix(column, row_key) % rows) % rows
    return row * columns + column


def _mix(indices: UInt64[np.ndarray, " n"], key: np.uint64) -> UInt64[np.ndarray, " n"]:
    mixed = indices + key  # wraps around
    for shift, factor in _SPLITMIX:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(_LAST_SHIFT))


def _keys(seed: int, epoch: int) -> UInt64[np.ndarray, "k 2"]:
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=ROUNDS * 2 * 8).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64).reshape(ROUNDS, 2)
