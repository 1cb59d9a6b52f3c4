"""Exact counts of blocks: what a budget buys and how it is spent; knows no attention."""

import dataclasses
import fractions
import math

import numpy as np
from jaxtyping import Bool, Float, Int

from xsake.errors import ArgumentError

MOST_BLOCKS = 2**16  # query blocks of one sequence


def visible_blocks(n: int) -> int:
    """Blocks of one head that causality leaves, of `n` query blocks and `n` kv blocks.

    Example:
        >>> visible_blocks(64)
        2080
    """
    return n * (n + 1) // 2


@dataclasses.dataclass(frozen=True)
class AlwaysOn:
    """Blocks that every head computes; they count inside every budget.

    Args:
        sinks: first kv blocks of the sequence.
        locals: last kv blocks up to the diagonal, which is one of them.

    Example:
        >>> AlwaysOn().grid(4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 0, 1, 1]])
        >>> AlwaysOn().counts(4), AlwaysOn().total(4)
        (array([1, 2, 3, 3]), 9)
    """

    sinks: int = 1
    locals: int = 2

    def __post_init__(self) -> None:
        for name, value in (("sinks", self.sinks), ("locals", self.locals)):
            if type(value) is not int or not 0 <= value <= MOST_BLOCKS:
                raise ArgumentError(
                    f"`{name}` is no number of always-on blocks",
                    got=repr(value),
                    expected=f"an int from 0 to {MOST_BLOCKS}",
                )

    @property
    def level(self) -> int:
        """Always-on blocks of a row that sees at least so many."""
        return self.sinks + self.locals

    def grid(self, n: int) -> Bool[np.ndarray, "Nq Nk"]:
        """True where a block is always on."""
        row, column = np.ogrid[:n, :n]
        return (column <= row) & ((column < self.sinks) | (row - column < self.locals))

    def counts(self, n: int) -> Int[np.ndarray, " Nq"]:
        """How many blocks of each row are always on."""
        return np.minimum(np.arange(1, n + 1), self.level)

    def total(self, n: int) -> int:
        """How many blocks of a head are always on."""
        return int(level_totals(np.array([0]), n, self)[0])


def level_totals(
    k: Int[np.ndarray, "*levels"], n: int, always: AlwaysOn
) -> Int[np.ndarray, "*levels"]:
    """Blocks of a head whose rows compute `k` blocks each, or what is always on, or all they see.

    Example:
        >>> level_totals(np.array([0, 3, 4, 5, 9]), 5, AlwaysOn())
        array([12, 12, 14, 15, 15])
    """
    level = np.clip(k, min(always.level, n), n).astype(np.int64)
    return level * n - level * (level - 1) // 2


def total_blocks(budget: float, *, heads: int, n: int, always: AlwaysOn) -> int:
    """Blocks that a budget buys over the whole model, always-on blocks counted inside.

    Args:
        budget: computed / causally visible blocks.
        heads: query heads of all layers.
        n: query blocks.
        always: what every head computes anyway.

    Returns:
        `budget * heads * visible_blocks(n)`, a half rounded up.

    Example:
        >>> total_blocks(0.2, heads=270, n=64, always=AlwaysOn())
        112320
    """
    total, least = _rounded(budget, heads, n), always.total(n)
    if total < heads * least:
        smallest = math.ceil(least / visible_blocks(n) * 1e4) / 1e4
        raise ArgumentError(
            "the budget does not even buy the always-on blocks",
            got=f"{budget=} of {visible_blocks(n)} visible blocks per head, {n=}",
            expected=f"at least {smallest}, for {least} always-on blocks per head",
            fix="raise the budget, use smaller blocks or a longer context",
        )
    return total


def closest_total(budget: float, *, heads: int, n: int, always: AlwaysOn) -> int:
    """`total_blocks`, or what is always on where a short sequence has more of it."""
    return max(_rounded(budget, heads, n), heads * always.total(n))


def _rounded(budget: float, heads: int, n: int) -> int:
    if not 0 < budget <= 1:  # nan is refused too
        raise ArgumentError(
            "a budget is a share of the visible blocks",
            got=f"{budget=}",
            expected="a number above 0, at most 1",
        )
    # As it is written: 0.3 is three tenths here, not the binary number next to it.
    asked = fractions.Fraction(str(float(budget))) * heads * visible_blocks(n)
    return math.floor(asked + fractions.Fraction(1, 2))


def row_counts(total: int, n: int, always: AlwaysOn) -> Int[np.ndarray, " Nq"]:
    """Constant-k rows: blocks of each row of a head that computes `total` blocks.

    Every row gets the same number `k`, or what is always on, or all it sees. What is left over
    goes to the last rows, one block each.

    Example:
        >>> row_counts(13, 5, AlwaysOn()).tolist()
        [1, 2, 3, 3, 4]
    """
    return row_counts_of_heads(np.array([total]), n, always)[0]


def row_counts_of_heads(
    totals: Int[np.ndarray, "*heads"], n: int, always: AlwaysOn
) -> Int[np.ndarray, "*heads Nq"]:
    """`row_counts` of many heads, int32."""
    levels = np.arange(min(always.level, n), n + 1)
    cost = level_totals(levels, n, always)
    if totals.size and not cost[0] <= totals.min() <= totals.max() <= cost[-1]:
        raise ArgumentError(
            "a head cannot compute that many blocks",
            got=f"totals from {totals.min()} to {totals.max()}, {n=}",
            expected=f"{cost[0]} (always on) to {cost[-1]} (all that is visible)",
        )
    place = np.searchsorted(cost, totals, side="right") - 1
    left = totals - cost[place]
    rows = np.arange(n, dtype=np.int32)
    counts = np.minimum(rows + 1, levels[place][..., None].astype(np.int32))
    return counts + (rows >= (n - left)[..., None])


def shared_out(
    weights: Float[np.ndarray, " X"],
    total: int,
    least: Int[np.ndarray, " X"],
    most: Int[np.ndarray, " X"],
) -> Int[np.ndarray, " X"]:
    """Whole numbers in proportion to `weights`, inside bounds, that add up to `total`.

    Largest remainders: those who are at no bound get their proportional share rounded down, and
    one more in the order of what rounding took from them; the first of equals comes first.

    Args:
        weights: finite, at least 0; where they are all 0 they count as equal.
        total: the exact sum.
        least: smallest number of each.
        most: largest number of each.

    Example:
        >>> shared_out(np.array([1.0, 1.0, 8.0]), 11, np.array([2, 0, 0]), np.array([9, 9, 7]))
        array([2, 2, 7])
    """
    if not (np.isfinite(weights).all() and (weights >= 0).all() and (least <= most).all()):
        raise ArgumentError(
            "weights or bounds cannot be shared by",
            got=f"{weights=}, {least=}, {most=}",
            expected="finite weights >= 0, least <= most",
        )
    if not least.sum() <= total <= most.sum():
        raise ArgumentError(
            "the bounds do not allow the total",
            got=f"{total=}",
            expected=f"{least.sum()} to {most.sum()}",
        )
    if not weights.size:
        return least.astype(np.int64)
    # Who has no weight gets something only after everyone else is full.
    weights = np.maximum(weights / (weights.max() or 1.0), 1e-12)
    low, high = 0.0, 1e12 * (float(most.max()) + 1)
    while low < (middle := (low + high) / 2) < high:
        if np.clip(middle * weights, least, most).sum() <= total:
            low = middle
        else:
            high = middle
    quotas = np.clip(low * weights, least, most)
    shares = np.floor(quotas).astype(np.int64)
    while (short := total - int(shares.sum())) > 0:
        order = np.argsort(shares - quotas, kind="stable")
        shares[order[(shares < most)[order]][:short]] += 1
    return shares


def take_rows(
    priority: Float[np.ndarray, "*heads Nq Nk"],
    counts: Int[np.ndarray, "*heads Nq"],
    always: AlwaysOn,
) -> Bool[np.ndarray, "*heads Nq Nk"]:
    """In each row the always-on blocks, then those of highest priority, exactly `counts`.

    Args:
        priority: of blocks, infinite if need be; of equals the lower block number goes first.
            What causality hides may hold anything but nan.
        counts: of rows, at least what is always on and at most what is visible.
        always: what comes first.

    Example:
        >>> take_rows(np.array([[0.0, 0, 0], [1, 0, 0], [3, 2, 0]]), np.array([1, 1, 2]),
        ...           AlwaysOn(sinks=0, locals=1)).astype(int)
        array([[1, 0, 0],
               [0, 1, 0],
               [1, 0, 1]])
    """
    n = priority.shape[-1]
    if (counts < always.counts(n)).any() or (counts > np.arange(1, n + 1)).any():
        raise ArgumentError(
            "a row cannot compute that many blocks",
            got=f"counts from {counts.min()} to {counts.max()}, {n=}",
            expected="in each row at least what is always on, at most what is visible",
        )
    return row_places(priority, always) < counts[..., None]


def row_places(
    priority: Float[np.ndarray, "*heads Nq Nk"], always: AlwaysOn
) -> Int[np.ndarray, "*heads Nq Nk"]:
    """The place of each block in its row: always-on blocks come first, hidden ones last.

    Example:
        >>> row_places(np.array([[0.0, 0, 0], [1, 0, 0], [3, 2, 0]]), AlwaysOn(0, 1))
        array([[0, 1, 2],
               [1, 0, 2],
               [1, 2, 0]], dtype=int32)
    """
    places = np.empty(priority.shape, np.int32)
    planes = (-1, *priority.shape[-2:])
    turns = np.arange(priority.shape[-1], dtype=np.int32)[None]
    # One head at a time: what is sorted stays in the cache.
    for plane, into in zip(priority.reshape(planes), places.reshape(planes), strict=True):
        order = np.argsort(_ranks(plane, always), axis=-1, kind="stable")
        np.put_along_axis(into, order, turns, axis=-1)
    return places


def take_pool(
    priority: Float[np.ndarray, "*heads Nq Nk"], total: int, always: AlwaysOn
) -> Bool[np.ndarray, "*heads Nq Nk"]:
    """The always-on blocks of all heads, then those of highest priority anywhere, exactly `total`.

    Args:
        priority: of blocks, infinite if need be; of equals the first in memory goes first. What
            causality hides may hold anything but nan.
        total: blocks to take from the whole array.
        always: what comes first.

    Example:
        >>> take_pool(np.array([[0.0, 9], [7, 0]]), 2, AlwaysOn(sinks=0, locals=0)).astype(int)
        array([[1, 0],
               [1, 0]])
    """
    n = priority.shape[-1]
    heads = math.prod(priority.shape[:-2])
    if not heads * always.total(n) <= total <= heads * visible_blocks(n):
        raise ArgumentError(
            "the array cannot give that many blocks",
            got=f"{total=}, {heads=}, {n=}",
            expected=f"{heads * always.total(n)} to {heads * visible_blocks(n)}",
        )
    rank = _ranks(priority, always).reshape(-1)
    if not total:
        return np.zeros(priority.shape, bool)
    last = np.partition(rank, total - 1)[total - 1]
    taken = rank < last
    ties = np.flatnonzero(rank == last)
    taken[ties[: total - np.count_nonzero(taken)]] = True
    return taken.reshape(priority.shape)


def _ranks(
    priority: Float[np.ndarray, "*heads Nq Nk"], always: AlwaysOn
) -> Float[np.ndarray, "*heads Nq Nk"]:
    """Low is early: -inf for always-on blocks, inf for hidden ones, finite for all others."""
    if np.isnan(priority).any():
        raise ArgumentError("priorities must be numbers", got="nan", expected="finite or infinite")
    n, largest = priority.shape[-1], np.finfo(priority.dtype).max
    rank = np.clip(-priority, -largest, largest)
    rank[..., ~np.tri(n, dtype=bool)] = np.inf
    rank[..., always.grid(n)] = -np.inf
    return rank
