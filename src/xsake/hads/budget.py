"""Exact block counts: how many blocks a budget buys and how heads and rows share them."""

import dataclasses
import fractions
import math
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from xsake.errors import ArgumentError

MAX_BLOCKS = 2**16  # query blocks of one sequence


def visible_blocks(n: int) -> int:
    """Return the causally visible blocks of one head with `n` query and `n` kv blocks.

    Example:
        >>> visible_blocks(64)
        2080
    """
    return n * (n + 1) // 2


@dataclasses.dataclass(frozen=True)
class ForcedBlocks:
    """Blocks that every head computes; every budget includes them.

    Args:
        num_sink: first kv blocks of the sequence.
        num_local: last kv blocks up to and including the diagonal.

    Example:
        >>> ForcedBlocks().grid(4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 0, 1, 1]])
        >>> ForcedBlocks().counts(4), ForcedBlocks().total(4)
        (array([1, 2, 3, 3]), 9)
    """

    num_sink: int = 1
    num_local: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is not int or not 0 <= value <= MAX_BLOCKS:
                expected = f"an int from 0 to {MAX_BLOCKS}"
                raise ArgumentError(
                    "forced-blocks", f"invalid `{name}`", got=repr(value), expected=expected
                )

    @property
    def blocks_per_row(self) -> int:
        """Forced blocks of a row, unless causality leaves fewer."""
        return self.num_sink + self.num_local

    def grid(self, n: int) -> Bool[np.ndarray, "Nq Nk"]:
        """Return True for forced blocks."""
        return self.includes(*np.ogrid[:n, :n])

    def includes(self, row: Any, column: Any) -> Any:
        """Return whether blocks at a row and a column are forced."""
        return (column <= row) & ((column < self.num_sink) | (row - column < self.num_local))

    def counts(self, n: int) -> Int[np.ndarray, " Nq"]:
        """Return the number of forced blocks of each row."""
        return np.minimum(np.arange(1, n + 1), self.blocks_per_row)

    def total(self, n: int) -> int:
        """Return the number of forced blocks of a head."""
        return int(level_totals(np.array([0]), n, self)[0])


def level_totals(
    k: Int[np.ndarray, "*levels"], n: int, forced: ForcedBlocks
) -> Int[np.ndarray, "*levels"]:
    """Return the blocks of a head with `k` blocks per row, clipped to the forced and the visible.

    Example:
        >>> level_totals(np.array([0, 3, 4, 5, 9]), 5, ForcedBlocks())
        array([12, 12, 14, 15, 15])
    """
    blocks_per_row = np.clip(k, min(forced.blocks_per_row, n), n).astype(np.int64)
    return blocks_per_row * n - blocks_per_row * (blocks_per_row - 1) // 2


def total_blocks(budget: float, *, heads: int, n: int, forced: ForcedBlocks) -> int:
    """Return the blocks that a budget allows over the whole model, forced blocks included.

    That is `budget * heads * visible_blocks(n)`, rounded half up.

    Example:
        >>> total_blocks(0.2, heads=270, n=64, forced=ForcedBlocks())
        112320
    """
    total, per_head = _round_total(budget, heads, n), forced.total(n)
    if total < heads * per_head:
        smallest = math.ceil(per_head / visible_blocks(n) * 1e4) / 1e4
        raise ArgumentError(
            "budget-below-forced",
            "the budget is smaller than the forced blocks",
            got=f"{budget=} of {visible_blocks(n)} visible blocks per head, {n=}",
            expected=f"at least {smallest}, for {per_head} forced blocks per head",
            fix="raise the budget, use smaller blocks or a longer context",
        )
    return total


def closest_total(budget: float, *, heads: int, n: int, forced: ForcedBlocks) -> int:
    """Return `total_blocks`, or the forced blocks if a short sequence has more of them."""
    return max(_round_total(budget, heads, n), heads * forced.total(n))


def require_feasible(total: int, heads: int, n: int, forced: ForcedBlocks) -> None:
    """Raise unless `total` blocks of all heads include the forced and are visible."""
    minimum, maximum = heads * forced.total(n), heads * visible_blocks(n)
    if not minimum <= total <= maximum:
        raise ArgumentError(
            "total-blocks",
            "total number of blocks out of range",
            got=f"{total=}, {heads=}, {n=}",
            expected=f"{minimum} (forced) to {maximum} (visible)",
        )


def _round_total(budget: float, heads: int, n: int) -> int:
    if not 0 < budget <= 1:  # also rejects nan
        what = "a budget is a share of the visible blocks"
        raise ArgumentError(
            "budget-range", what, got=f"{budget=}", expected="a number above 0, at most 1"
        )
    # The decimal value: 0.3 means three tenths, not the nearest binary number.
    exact = fractions.Fraction(str(float(budget))) * heads * visible_blocks(n)
    return math.floor(exact + fractions.Fraction(1, 2))


def row_counts(
    totals: int | Int[np.ndarray, "*heads"], n: int, forced: ForcedBlocks
) -> Int[np.ndarray, "*heads Nq"]:
    """Spread the blocks of each head over its rows with a constant `k` per head; int32.

    A row gets `k` blocks, at least its forced and at most its visible ones. The remainder goes to
    the last rows, one block each.

    Example:
        >>> row_counts(13, 5, ForcedBlocks()).tolist()
        [1, 2, 3, 3, 4]
    """
    totals = np.asarray(totals)
    levels = np.arange(min(forced.blocks_per_row, n), n + 1)
    cost = level_totals(levels, n, forced)
    if totals.size and not cost[0] <= totals.min() <= totals.max() <= cost[-1]:
        raise ArgumentError(
            "head-blocks",
            "number of blocks per head out of range",
            got=f"totals from {totals.min()} to {totals.max()}, {n=}",
            expected=f"{cost[0]} (forced) to {cost[-1]} (visible)",
        )
    index = np.searchsorted(cost, totals, side="right") - 1
    remainder = np.asarray(totals - cost[index])
    rows = np.arange(n, dtype=np.int32)
    counts = np.minimum(rows + 1, np.asarray(levels[index], np.int32)[..., None])
    return counts + (rows >= (n - remainder)[..., None])


def apportion(
    weights: Float[np.ndarray, " X"],
    total: int,
    minimum: int | Int[np.ndarray, " X"],
    maximum: int | Int[np.ndarray, " X"],
) -> Int[np.ndarray, " X"]:
    """Return integers proportional to `weights` within bounds whose sum is `total`.

    Largest-remainder method: entries inside their bounds get their proportional share rounded
    down, then one more in the order of the rounding loss; ties go to the first. Equal shares if all
    weights are 0.

    Example:
        >>> apportion(np.array([1.0, 1.0, 8.0]), 11, np.array([2, 0, 0]), np.array([9, 9, 7]))
        array([2, 2, 7])
    """
    minimum, maximum = (np.broadcast_to(bound, weights.shape) for bound in (minimum, maximum))
    if not (np.isfinite(weights).all() and (weights >= 0).all() and (minimum <= maximum).all()):
        raise ArgumentError(
            "projection-arguments",
            "invalid weights or bounds",
            got=f"{weights=}, {minimum=}, {maximum=}",
            expected="finite weights >= 0, minimum <= maximum",
        )
    if not minimum.sum() <= total <= maximum.sum():
        expected = f"{minimum.sum()} to {maximum.sum()}"
        raise ArgumentError(
            "projection-total", "total outside of the bounds", got=f"{total=}", expected=expected
        )
    if not weights.size:
        return minimum.astype(np.int64)
    # Entries of weight 0 get something only after all others are at their maximum.
    weights = np.maximum(weights / (weights.max() or 1.0), 1e-12)
    low, high = 0.0, 1e12 * (float(maximum.max()) + 1)
    while low < (middle := (low + high) / 2) < high:
        if np.clip(middle * weights, minimum, maximum).sum() <= total:
            low = middle
        else:
            high = middle
    quotas = np.clip(low * weights, minimum, maximum)
    shares = np.floor(quotas).astype(np.int64)
    while (missing := total - int(shares.sum())) > 0:
        order = np.argsort(shares - quotas, kind="stable")
        shares[order[(shares < maximum)[order]][:missing]] += 1
    return shares
