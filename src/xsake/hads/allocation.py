"""Allocation of blocks to heads with exact totals: greedy on curves, or on static units."""

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from xsake.errors import ArgumentError
from xsake.hads.budget import ForcedBlocks, level_totals, require_feasible


def water_fill(
    losses: Float[np.ndarray, "L Hq levels"],
    total: int,
    forced: ForcedBlocks,
    *,
    floor: int | None = None,
) -> Int[np.ndarray, "L Hq"]:
    """Allocate `total` blocks to heads so that the sum of losses is minimal.

    A head with `k` blocks per row has the loss `losses[k]`, and the step to `k + 1` costs `n - k`
    blocks. Segments of the lower convex hulls of all heads are taken in the order of loss saved per
    block until `total` is spent (Fox, 1966). The result is optimal if every head ends on a corner
    of its hull. All but one do: the last gets a part of its segment, which `row_counts` turns into
    rows of `k` and `k + 1` blocks.

    `floor` is the minimum of blocks per row beyond the forced ones. None: 1 if the total allows it,
    else 0. Without it a head without measured benefit would get forced blocks only.

    Example:
        >>> steep, flat = [3.0, 3, 3, 3, 1, 0], [1.0, 1, 1, 1, 0.5, 0]
        >>> water_fill(np.array([[steep, flat]]), 27, ForcedBlocks(), floor=0)
        array([[15, 12]])
    """
    n, count = losses.shape[2] - 1, losses.shape[0] * losses.shape[1]
    first = _first_level(total, count, n, forced, floor)
    cost = level_totals(np.arange(first, n + 1), n, forced)
    segments = [_hull_segments(cost, loss) for loss in losses.reshape(count, -1)[:, first:]]
    saved, blocks = (np.concatenate(parts) for parts in zip(*segments, strict=True))
    head = np.repeat(np.arange(count), [each.size for each, _ in segments])
    order = np.argsort(-saved / blocks, kind="stable")
    blocks, head = blocks[order], head[order]
    remaining = total - count * int(cost[0]) - (np.cumsum(blocks) - blocks)
    totals = np.full(count, cost[0])
    np.add.at(totals, head, np.clip(remaining, 0, blocks))
    return totals.reshape(losses.shape[:2])


def _hull_segments(
    cost: Int[np.ndarray, " K"], loss: Float[np.ndarray, " K"]
) -> tuple[Float[np.ndarray, " segments"], Int[np.ndarray, " segments"]]:
    """Return loss saved and blocks of each segment of the lower convex hull of a head's losses."""
    corners = [0]
    x, y = cost.tolist(), loss.tolist()
    for k in range(1, len(x)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y[b] - y[a]) * (x[k] - x[b]) < (y[k] - y[b]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(k)
    return -np.diff(loss[corners]), np.diff(cost[corners])


def _first_level(total: int, heads: int, n: int, forced: ForcedBlocks, floor: int | None) -> int:
    require_feasible(total, heads, n, forced)
    lowest = min(forced.blocks_per_row, n)
    level = min(lowest + (1 if floor is None else floor), n)
    required = heads * int(level_totals(np.array([level]), n, forced)[0])
    if required <= total:
        return level
    if floor is not None:
        raise ArgumentError(
            "total-below-floor",
            "the total is smaller than the floor of all heads",
            got=f"{floor=}, {total=}",
            expected=f"a total of {required} or more",
            fix="lower or omit the floor, or raise the budget",
        )
    return lowest


class StaticUnits(NamedTuple):
    """Diagonals and columns of each head."""

    totals: Int[np.ndarray, "L Hq"]
    offsets: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]


def static_units(
    offset_mass: Float[np.ndarray, "L Hq Nk"],
    column_mass: Float[np.ndarray, "L Hq Nk"],
    total: int,
    forced: ForcedBlocks,
) -> StaticUnits:
    """Select diagonals and columns greedily by mass per block, over all heads.

    A diagonal `d` has `n - d` blocks, a column `j` has `n - j`; blocks that are selected already
    have no cost and no gain. The first unit that does not fit ends the selection: its head gets
    the remaining blocks, which `take_units` places next to the diagonal. Masses are means over the
    blocks of a diagonal, and of a column below the diagonal.
    """
    n = offset_mass.shape[-1]
    rows = zip(offset_mass.reshape(-1, n), column_mass.reshape(-1, n), strict=True)
    states = [_HeadUnits(offsets, columns, forced) for offsets, columns in rows]
    totals = np.full(len(states), forced.total(n))
    remaining = total - int(totals.sum())
    require_feasible(total, len(states), n, forced)
    queue = [(*state.best(), head) for head, state in enumerate(states)]
    heapq.heapify(queue)
    while remaining > 0:
        _, unit, head = heapq.heappop(queue)
        cost = int(states[head].cost[unit])
        totals[head] += min(cost, remaining)
        remaining -= cost
        if remaining >= 0:
            states[head].take(unit)
            heapq.heappush(queue, (*states[head].best(), head))
    return StaticUnits(
        totals.reshape(offset_mass.shape[:2]),
        tuple(state.selection(0)[min(forced.num_local, n) :] for state in states),
        tuple(state.selection(1)[min(forced.num_sink, n) :] for state in states),
    )


class _HeadUnits:
    """Remaining gain and cost of the units of a head: 0..n-1 diagonals, n..2n-1 columns."""

    def __init__(self, offset_mass: np.ndarray, column_mass: np.ndarray, forced: ForcedBlocks):
        self.n = len(offset_mass)
        number = np.arange(self.n)
        self._mass = np.concatenate([offset_mass, column_mass])
        # The mean of a column excludes its diagonal block.
        blocks = np.concatenate([self.n - number, self.n - 1 - number])
        self._gain = self._mass * blocks
        self.cost = np.tile(self.n - number, 2)
        self._is_open = np.ones(2 * self.n, bool)
        for unit in number[: forced.num_local].tolist():
            self.take(unit)
        for unit in (self.n + number[: forced.num_sink]).tolist():
            self.take(unit)

    def take(self, unit: int) -> None:
        """Select a unit; open units that cross it lose the shared block."""
        is_column, number = divmod(unit, self.n)
        self._is_open[unit] = False
        first = 0 if is_column else self.n
        crossing = first + np.arange(self.n - number)
        crossing = crossing[self._is_open[crossing]]
        self.cost[crossing] -= 1
        if unit:  # the main diagonal is not in the mean of a column
            self._gain[crossing] -= self._mass[unit]

    def best(self) -> tuple[float, int]:
        """Return the negated mass per block and the number of the best open unit.

        A head without open units returns mass -1, which is never selected.
        """
        density = np.maximum(self._gain, 0) / np.maximum(self.cost, 1)
        density[~self._is_open | (self.cost == 0)] = -1
        unit = int(np.argmax(density))
        return -float(density[unit]), unit

    def selection(self, axis: int) -> tuple[int, ...]:
        """Return the selected diagonals (0) or columns (1), forced ones included."""
        is_open = self._is_open[axis * self.n : (axis + 1) * self.n]
        return tuple(np.flatnonzero(~is_open).tolist())


def take_units(
    offsets: tuple[int, ...], columns: tuple[int, ...], total: int, n: int, forced: ForcedBlocks
) -> Bool[np.ndarray, "Nq Nk"]:
    """Return exactly `total` blocks of a static head at any length.

    Forced blocks come first, then diagonals and columns by number, then further diagonals, nearest
    first. The unit at which the total is reached keeps its last rows. Diagonals and
    columns from `n` on are ignored.

    Example:
        >>> take_units((3,), (), 17, 6, ForcedBlocks(num_sink=0, num_local=2)).astype(int)
        array([[1, 0, 0, 0, 0, 0],
               [1, 1, 0, 0, 0, 0],
               [0, 1, 1, 0, 0, 0],
               [1, 1, 1, 1, 0, 0],
               [0, 1, 1, 1, 1, 0],
               [0, 0, 1, 1, 1, 1]])
    """
    number = np.arange(n)
    diagonal_rank, column_rank = 2 * n + number, np.full(n, 3 * n)
    listed = np.intersect1d(offsets, number).astype(int)
    diagonal_rank[listed] = 2 * listed
    listed = np.intersect1d(columns, number).astype(int)
    column_rank[listed] = 2 * listed + 1
    rank = np.minimum(diagonal_rank[np.abs(number[:, None] - number)], column_rank)
    require_feasible(total, 1, n, forced)
    # Different for all blocks that are neither forced nor masked.
    order = np.where(np.tri(n, dtype=bool), float(n) * rank - number[:, None], np.inf)
    order[forced.grid(n)] = -np.inf
    return order <= np.partition(order.ravel(), total - 1)[total - 1] if total else order < -np.inf
