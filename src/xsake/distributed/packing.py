"""Shares work out: as many items to every part, and as little as possible to the busiest one."""

import functools
import heapq

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.errors import ArgumentError

# A pair of parts with this many items or fewer is shared out anew by trying everything: 6,435
# ways for 16 items.
_TRIED_ITEMS = 16
# A busiest part that is this close to the mean is not worth another try.
_CLOSE = 1e-3


def equal_parts(
    work: Float[np.ndarray, " N"] | Int[np.ndarray, " N"], parts: int
) -> Int[np.ndarray, "parts each"]:
    """Items shared out to parts of equal size, so that the busiest part has little work.

    The heaviest item that is left goes to the least busy part that has room. Then items of the
    busiest part change places with others as long as that makes it less busy, until it has at most
    a thousandth more than the mean. Deterministic.

    Args:
        work: of each item, at least 0; their number is a multiple of `parts`.
        parts: how many.

    Returns:
        The items of each part, ascending.

    Example:
        >>> equal_parts(np.array([9, 1, 8, 2, 7, 3]), 3).tolist()
        [[0, 1], [2, 3], [4, 5]]
    """
    if parts < 1 or work.size == 0 or work.size % parts:
        raise ArgumentError(
            "the items cannot be shared out in equal numbers",
            got=f"{work.size} items, {parts} parts",
            expected="a multiple of the parts",
        )
    if not np.isfinite(work).all() or (work < 0).any():
        raise ArgumentError(
            "work must be finite and not below 0", got=f"{work.min()} to {work.max()}"
        )
    work = work.astype(np.float64)
    owner = _heaviest_first(work, parts)
    _swap(work, owner, parts)
    while _share_pair_anew(work, owner, parts):
        _swap(work, owner, parts)
    return np.stack([np.flatnonzero(owner == part) for part in range(parts)])


def _heaviest_first(work: np.ndarray, parts: int) -> np.ndarray:
    """The part of each item."""
    owner = np.empty(work.size, np.int64)
    heap = [(0.0, part, work.size // parts) for part in range(parts)]
    for item in np.argsort(-work, kind="stable"):
        load, part, room = heapq.heappop(heap)
        owner[item] = part
        if room > 1:
            heapq.heappush(heap, (load + work[item], part, room - 1))
    return owner


def _loads(work: np.ndarray, owner: np.ndarray, parts: int) -> np.ndarray:
    return np.bincount(owner, work, parts)


def _swap(work: np.ndarray, owner: np.ndarray, parts: int) -> None:
    """Swap items of the busiest part with others, the best swap first, while it helps.

    Each swap leaves both parts less busy than the busiest was, so it ends.
    """
    while True:
        load = _loads(work, owner, parts)
        busiest = int(load.argmax())
        own, other = np.flatnonzero(owner == busiest), np.flatnonzero(owner != busiest)
        if other.size == 0 or load[busiest] <= load.mean() * (1 + _CLOSE):
            return
        relief = work[own][:, None] - work[other][None, :]
        found = np.maximum(load[busiest] - relief, load[owner[other]][None, :] + relief)
        best = int(found.argmin())
        if not found.flat[best] < load[busiest] * (1 - 1e-12):
            return
        mine, theirs = own[best // other.size], other[best % other.size]
        owner[mine], owner[theirs] = owner[theirs], owner[mine]


def _share_pair_anew(work: np.ndarray, owner: np.ndarray, parts: int) -> bool:
    """Share the items of the busiest part and of another out in the best of all ways, if small."""
    load = _loads(work, owner, parts)
    busiest, each = int(load.argmax()), work.size // parts
    if parts == 1 or 2 * each > _TRIED_ITEMS or load[busiest] <= load.mean() * (1 + _CLOSE):
        return False
    ways = _halves(2 * each)
    for partner in np.argsort(load, kind="stable"):
        if partner == busiest:
            continue
        items = np.flatnonzero((owner == busiest) | (owner == partner))
        sums = ways @ work[items]
        found = np.maximum(sums, work[items].sum() - sums)
        best = int(found.argmin())
        if found[best] < load[busiest] * (1 - 1e-12):
            owner[items] = np.where(ways[best], busiest, partner)
            return True
    return False


@functools.cache
def _halves(items: int) -> np.ndarray:
    """All ways to take half of `items` items, bool [ways, items]; each half once."""
    numbers = np.arange(2 ** (items - 1))
    bits = numbers[:, None] >> np.arange(items)[None, :] & 1
    return bits[bits.sum(1) == items // 2].astype(bool)


def dealt(work: Int[Array, " N"], parts: int) -> Int[Array, "parts each"]:
    """`equal_parts` inside a traced program: the sorted items are dealt to and fro.

    Two parts differ by less than the heaviest item weighs: what a round gives to one part rather
    than another is a step down the sorted weights, rounds go in turn to either side, and all steps
    together are no longer than the way from the heaviest to the lightest.

    Args:
        work: of each item; their number is a multiple of `parts`.
        parts: how many.

    Returns:
        The items of each part, ascending.
    """
    rounds = jnp.argsort(-work, stable=True).astype(jnp.int32).reshape(-1, parts)
    turned = jnp.arange(rounds.shape[0])[:, None] % 2 == 1
    return jnp.sort(jnp.where(turned, rounds[:, ::-1], rounds).T, axis=1)
