"""Partition items into parts of equal size with a small maximum work."""

import functools
import heapq

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.errors import ArgumentError

# A pair of parts with at most this many items is repartitioned by exhaustive search: 6,435 ways
# for 16 items.
_MAX_EXHAUSTIVE_ITEMS = 16
# Stop when the maximum is within this fraction of the mean.
_TOLERANCE = 1e-3


def partition_equal(
    work: Float[np.ndarray, " N"] | Int[np.ndarray, " N"], parts: int
) -> Int[np.ndarray, "parts each"]:
    """Partition items into parts of equal size with a small maximum work.

    Greedy assignment of the heaviest item to the least loaded part with free slots, then swaps
    between the most loaded part and others while they reduce the maximum, until it is within 0.1%
    of the mean. Deterministic.

    Args:
        work: work of each item, at least 0; the number of items is a multiple of `parts`.
        parts: number of parts.

    Returns:
        Items of each part, ascending.

    Example:
        >>> partition_equal(np.array([9, 1, 8, 2, 7, 3]), 3).tolist()
        [[0, 1], [2, 3], [4, 5]]
    """
    if parts < 1 or work.size == 0 or work.size % parts:
        raise ArgumentError(
            "the number of items is not a multiple of the parts",
            got=f"{work.size} items, {parts} parts",
            expected="a multiple of the parts",
        )
    if not np.isfinite(work).all() or (work < 0).any():
        raise ArgumentError(
            "work must be finite and non-negative", got=f"{work.min()} to {work.max()}"
        )
    work = work.astype(np.float64)
    owner = _assign_heaviest_first(work, parts)
    _swap(work, owner, parts)
    while _repartition_pair(work, owner, parts):
        _swap(work, owner, parts)
    return np.stack([np.flatnonzero(owner == part) for part in range(parts)])


def _assign_heaviest_first(work: np.ndarray, parts: int) -> np.ndarray:
    """Return the part of each item by greedy assignment."""
    owner = np.empty(work.size, np.int64)
    heap = [(0.0, part, work.size // parts) for part in range(parts)]
    for item in np.argsort(-work, kind="stable"):
        load, part, remaining = heapq.heappop(heap)
        owner[item] = part
        if remaining > 1:
            heapq.heappush(heap, (load + work[item], part, remaining - 1))
    return owner


def _loads(work: np.ndarray, owner: np.ndarray, parts: int) -> np.ndarray:
    return np.bincount(owner, work, parts)


def _swap(work: np.ndarray, owner: np.ndarray, parts: int) -> None:
    """Swap items of the most loaded part with others, best swap first, while the maximum falls.

    Each swap leaves both parts below the previous maximum, so the loop terminates.
    """
    while True:
        load = _loads(work, owner, parts)
        busiest = int(load.argmax())
        items, other = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        if other.size == 0 or load[busiest] <= load.mean() * (1 + _TOLERANCE):
            return
        relief = work[items][:, None] - work[other][None, :]
        maximum = np.maximum(load[busiest] - relief, load[owner[other]][None, :] + relief)
        best = int(maximum.argmin())
        if not maximum.flat[best] < load[busiest] * (1 - 1e-12):
            return
        item, other_item = items[best // other.size], other[best % other.size]
        owner[item], owner[other_item] = owner[other_item], owner[item]


def _repartition_pair(work: np.ndarray, owner: np.ndarray, parts: int) -> bool:
    """Repartition the most loaded part and another one optimally, if they are small."""
    load = _loads(work, owner, parts)
    busiest, each = int(load.argmax()), work.size // parts
    if (
        parts == 1
        or 2 * each > _MAX_EXHAUSTIVE_ITEMS
        or load[busiest] <= load.mean() * (1 + _TOLERANCE)
    ):
        return False
    ways = _halves(2 * each)
    for partner in np.argsort(load, kind="stable"):
        if partner == busiest:
            continue
        items = np.flatnonzero((owner == busiest) | (owner == partner))
        sums = ways @ work[items]
        maximum = np.maximum(sums, work[items].sum() - sums)
        best = int(maximum.argmin())
        if maximum[best] < load[busiest] * (1 - 1e-12):
            owner[items] = np.where(ways[best], busiest, partner)
            return True
    return False


@functools.cache
def _halves(items: int) -> np.ndarray:
    """Return all ways to select half of `items` items, bool [ways, items], without complements."""
    subsets = np.arange(2 ** (items - 1))
    bits = subsets[:, None] >> np.arange(items)[None, :] & 1
    return bits[bits.sum(1) == items // 2].astype(bool)


def partition_snake(work: Int[Array, " N"], parts: int) -> Int[Array, "parts each"]:
    """Traced `partition_equal`: sorted items are assigned in snake (zigzag) order.

    The work of two parts differs by at most the difference between the heaviest and the lightest
    item: the differences of consecutive rounds alternate in sign and telescope.
    """
    rounds = jnp.argsort(-work, stable=True).astype(jnp.int32).reshape(-1, parts)
    is_reversed = jnp.arange(rounds.shape[0])[:, None] % 2 == 1
    return jnp.sort(jnp.where(is_reversed, rounds[:, ::-1], rounds).T, axis=1)
