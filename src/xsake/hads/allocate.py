"""From what blocks are worth to how many each head gets; exact totals, knows no files."""

import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from xsake.errors import ArgumentError
from xsake.hads.budget import AlwaysOn, level_totals, take_pool, visible_blocks


def water_fill(
    losses: Float[np.ndarray, "L Hq levels"],
    total: int,
    always: AlwaysOn,
    *,
    floor: int | None = None,
) -> Int[np.ndarray, "L Hq"]:
    """Blocks of each head for the least sum of losses over all heads.

    A head whose rows compute `k` blocks loses `losses[k]`, and the step to `k + 1` costs `n - k`
    blocks. The lower convex hull of a head's losses over blocks is a list of ever flatter segments;
    those of all heads are bought in the order of loss saved per block until `total` is spent (Fox,
    1966). Nothing is better where every head ends on a corner of its hull, and all do but one: that
    one gets a part of its segment, which `row_counts` turns into rows of `k` and `k + 1` blocks.

    Args:
        losses: at `k` from 0 to `n` blocks per row; constant where fewer than what is always on.
        total: blocks of all heads.
        always: what every head computes anyway.
        floor: blocks per row that every head gets beyond those. None: 1 if the total allows it,
            else 0. A head that calibration saw no use for would otherwise get nothing at all.

    Returns:
        Blocks of each head; they add up to `total`.

    Example:
        >>> steep, flat = [3.0, 3, 3, 3, 1, 0], [1.0, 1, 1, 1, 0.5, 0]
        >>> water_fill(np.array([[steep, flat]]), 27, AlwaysOn(), floor=0)
        array([[15, 12]])
    """
    layers, heads, n = losses.shape[0], losses.shape[1], losses.shape[2] - 1
    count = layers * heads
    first = _first_level(total, count, n, always, floor)
    cost = level_totals(np.arange(first, n + 1), n, always)
    segments = [_segments(cost, loss) for loss in losses.reshape(count, -1)[:, first:]]
    saved = np.concatenate([each.saved for each in segments])
    blocks = np.concatenate([each.blocks for each in segments])
    head = np.repeat(np.arange(count), [each.blocks.size for each in segments])
    order = np.argsort(-saved / blocks, kind="stable")
    blocks, head = blocks[order], head[order]
    left = total - count * int(cost[0]) - (np.cumsum(blocks) - blocks)
    totals = np.full(count, cost[0])
    np.add.at(totals, head, np.clip(left, 0, blocks))
    return totals.reshape(layers, heads)


class _Segments(NamedTuple):
    saved: Float[np.ndarray, " segments"]
    blocks: Int[np.ndarray, " segments"]


def _segments(cost: Int[np.ndarray, " K"], loss: Float[np.ndarray, " K"]) -> _Segments:
    """The lower convex hull of a head's losses over blocks, corner to corner."""
    corners = [0]
    x, y = cost.tolist(), loss.tolist()
    for k in range(1, len(x)):
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y[b] - y[a]) * (x[k] - x[b]) < (y[k] - y[b]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(k)
    return _Segments(-np.diff(loss[corners]), np.diff(cost[corners]))


def _first_level(total: int, heads: int, n: int, always: AlwaysOn, floor: int | None) -> int:
    _require_possible(total, heads, n, always)
    bare = min(always.level, n)
    wanted = min(bare + (1 if floor is None else floor), n)
    asked = heads * int(level_totals(np.array([wanted]), n, always)[0])
    if asked <= total:
        return wanted
    if floor is not None:
        raise ArgumentError(
            "the total does not buy the floor of every head",
            got=f"{floor=}, {total=}",
            expected=f"a total of {asked} or more",
            fix="lower the floor, leave it out, or raise the budget",
        )
    return bare


def _require_possible(total: int, heads: int, n: int, always: AlwaysOn) -> None:
    least, most = heads * always.total(n), heads * visible_blocks(n)
    if not least <= total <= most:
        raise ArgumentError(
            "the heads cannot compute that many blocks",
            got=f"{total=}, {heads=}, {n=}",
            expected=f"{least} (always on) to {most} (all that is visible)",
        )


def dropped_mass(curves: Float[np.ndarray, "L Hq levels"]) -> Float[np.ndarray, "L Hq levels"]:
    """The mass that `exp(-curve)` leaves out.

    A curve is a mean of logarithms, so `exp(-curve)` is the geometric mean of the kept mass over
    queries, which is at most its arithmetic mean: single queries that lose much weigh more.
    """
    return -np.expm1(-curves)


class Units(NamedTuple):
    """Whole diagonals and columns of each head, and its blocks.

    Attributes:
        totals: blocks of each head, always-on ones counted.
        offsets: of the diagonals of each head, in the order of `totals` flattened, ascending.
        columns: of each head, likewise.
    """

    totals: Int[np.ndarray, "L Hq"]
    offsets: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]


def static_units(
    offset_mass: Float[np.ndarray, "L Hq Nk"],
    column_mass: Float[np.ndarray, "L Hq Nk"],
    total: int,
    always: AlwaysOn,
) -> Units:
    """Greedy choice of diagonals and columns by mass per block, over all heads at once.

    A diagonal `d` has `n - d` blocks and a column `j` as many below and on the diagonal; blocks
    that are computed already cost nothing and bring nothing. The first unit that does not fit ends
    it: its head gets the blocks that are left, which `take_units` spends next to the diagonal.

    Args:
        offset_mass: mean mass of the blocks of each diagonal.
        column_mass: mean mass of the blocks of each column below the diagonal.
        total: blocks of all heads.
        always: what every head computes anyway.
    """
    layers, heads, n = offset_mass.shape
    rows = zip(offset_mass.reshape(-1, n), column_mass.reshape(-1, n), strict=True)
    states = [_Head(offsets, columns, always) for offsets, columns in rows]
    totals = np.full(len(states), always.total(n))
    left = total - int(totals.sum())
    _require_possible(total, len(states), n, always)
    queue = [(*state.best(), head) for head, state in enumerate(states)]
    heapq.heapify(queue)
    while left > 0:
        _, unit, head = heapq.heappop(queue)
        cost = int(states[head].cost[unit])
        totals[head] += min(cost, left)
        left -= cost
        if left >= 0:
            states[head].take(unit)
            heapq.heappush(queue, (*states[head].best(), head))
    return Units(
        totals.reshape(layers, heads),
        tuple(state.chosen(0)[min(always.locals, n) :] for state in states),
        tuple(state.chosen(1)[min(always.sinks, n) :] for state in states),
    )


class _Head:
    """Units 0..n-1 are diagonals, n..2n-1 columns; what each would still bring and cost."""

    def __init__(
        self,
        offset_mass: Float[np.ndarray, " Nk"],
        column_mass: Float[np.ndarray, " Nk"],
        always: AlwaysOn,
    ):
        self.n = len(offset_mass)
        number = np.arange(self.n)
        self._mass = np.concatenate([offset_mass, column_mass])
        # The mean of a column leaves out its diagonal block.
        blocks = np.concatenate([self.n - number, self.n - 1 - number])
        self._gain = self._mass * blocks
        self.cost = np.tile(self.n - number, 2)
        self._is_open = np.ones(2 * self.n, bool)
        for offset in range(min(always.locals, self.n)):
            self.take(offset)
        for column in range(min(always.sinks, self.n)):
            self.take(self.n + column)

    def take(self, unit: int) -> None:
        """Compute a unit; the open units that cross it share a block with it."""
        is_column, number = divmod(unit, self.n)
        self._is_open[unit] = False
        first = 0 if is_column else self.n
        crossing = first + np.arange(self.n - number)
        crossing = crossing[self._is_open[crossing]]
        self.cost[crossing] -= 1
        if unit:  # the diagonal itself is not in the mean of a column
            self._gain[crossing] -= self._mass[unit]

    def best(self) -> tuple[float, int]:
        """The open unit with the most mass per block, and that mass, negated for a queue.

        A head that has all its blocks offers a unit of mass -1, which nobody takes.
        """
        density = np.maximum(self._gain, 0) / np.maximum(self.cost, 1)
        density[~self._is_open | (self.cost == 0)] = -1
        unit = int(np.argmax(density))
        return -float(density[unit]), unit

    def chosen(self, kind: int) -> tuple[int, ...]:
        """Numbers of the computed diagonals (0) or columns (1), always-on ones included."""
        part = self._is_open[kind * self.n : (kind + 1) * self.n]
        return tuple(np.flatnonzero(~part).tolist())


def take_units(
    offsets: tuple[int, ...], columns: tuple[int, ...], total: int, n: int, always: AlwaysOn
) -> Bool[np.ndarray, "Nq Nk"]:
    """The blocks of a static head, at any length, exactly `total`.

    What is always on comes first, then diagonals and columns in the order of their numbers, then
    further diagonals, nearest first. The unit at which the total ends keeps its last rows.

    Args:
        offsets: of diagonals; those beyond `n` do not exist.
        columns: numbers of columns.
        total: blocks of the head, always-on ones counted.
        n: query blocks.
        always: what every head computes anyway.

    Example:
        >>> take_units((3,), (), 17, 6, AlwaysOn(sinks=0, locals=2)).astype(int)
        array([[1, 0, 0, 0, 0, 0],
               [1, 1, 0, 0, 0, 0],
               [0, 1, 1, 0, 0, 0],
               [1, 1, 1, 1, 0, 0],
               [0, 1, 1, 1, 1, 0],
               [0, 0, 1, 1, 1, 1]])
    """
    number = np.arange(n)
    diagonal_rank, column_rank = 2 * n + number, np.full(n, 3 * n)
    listed = np.array([offset for offset in offsets if offset < n], int)
    diagonal_rank[listed] = 2 * listed
    listed = np.array([column for column in columns if column < n], int)
    column_rank[listed] = 2 * listed + 1
    rank = np.minimum(diagonal_rank[np.abs(number[:, None] - number)], column_rank)
    return take_pool(number[:, None] - float(n) * rank, total, always)
