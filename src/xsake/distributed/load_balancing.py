"""Load balancing of context parallelism: assign query blocks to shards with nearly equal work.

Contiguous token shards of a causal or sparse call have unequal work, so a shard computes assigned
query blocks instead of the ones it stores. All shards have the same number of blocks.
"""

import dataclasses
import functools
import heapq
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.layout.csr import Items, gather_rows, item_rows

Assignment = Literal["work", "zigzag"]
"""Assignment of query blocks: by their number of listed blocks, or in zigzag order."""

EMPTY = -1
"""Padding of assignments if blocks do not divide evenly."""

# A pair of parts with at most this many items is repartitioned by exhaustive search: 6,435 ways
# for 16 items.
_MAX_EXHAUSTIVE_ITEMS = 16
# Stop when the maximum is within this fraction of the mean.
_TOLERANCE = 1e-3


def zigzag_shard(xp, block: Any, shards: int) -> Any:
    """Return the shard of a block in zigzag order: 0, 1, ..., n-1, n-1, ..., 0, 0, ..."""
    index = block % shards
    return xp.where(block // shards % 2 == 1, shards - 1 - index, index)


def zigzag_block(xp, shard: Any, round_: Any, shards: int) -> Any:
    """Return the block of a shard in a round: the inverse of `zigzag_shard`."""
    return round_ * shards + xp.where(round_ % 2 == 1, shards - 1 - shard, shard)


def assign_zigzag(blocks: int, shards: int) -> Int[np.ndarray, "shards each"]:
    """Assign blocks in zigzag order; balanced if work grows linearly along the sequence.

    Example:
        >>> assign_zigzag(7, 2).tolist()
        [[0, 3, 4, -1], [1, 2, 5, 6]]
    """
    rounds = np.arange(-(-blocks // shards))[None, :]
    order = zigzag_block(np, np.arange(shards)[:, None], rounds, shards)
    return np.where(order < blocks, order, EMPTY).astype(np.int32)


def assign_by_work(work: Int[np.ndarray, " Nq"], shards: int) -> Int[np.ndarray, "shards each"]:
    """Assign blocks so that shards have nearly equal work.

    Example:
        >>> assign_by_work(np.array([1, 2, 3, 4, 5, 6]), 2).tolist()
        [[1, 2, 5], [0, 3, 4]]
    """
    padded = np.pad(work, (0, -work.size % shards))
    order = partition_equal(padded, shards)
    return np.where(order < work.size, order, EMPTY).astype(np.int32)


def assign_by_work_jax(work: Int[Array, " Nq"], shards: int) -> Int[Array, "shards each"]:
    """Traced `assign_by_work`, slightly less balanced; see `partition_snake`."""
    order = partition_snake(jnp.pad(work, (0, -work.shape[0] % shards)), shards)
    return jnp.where(order < work.shape[0], order, EMPTY).astype(jnp.int32)


def assign_blocks(xp, work: Any, shards: int, assignment: Assignment) -> Any:
    """Assign query blocks with `work` listed blocks to shards, [shards, each]; `EMPTY` pads."""
    if assignment == "zigzag":
        return assign_zigzag(work.shape[0], shards)
    return assign_by_work(work, shards) if xp is np else assign_by_work_jax(work, shards)


def shard_items(xp, items: Items, planes: Any, q_blocks: int, blocks: Any, capacity: int) -> Items:
    """Return the lists of one shard: query blocks `blocks` [each] of the (batch, head) `planes`."""
    rows = items.row_starts.shape[0] - 1
    starts = xp.concatenate([items.row_starts, items.row_starts[-1:]])  # append an empty row
    index = xp.where(blocks[None, :] == EMPTY, rows, planes[:, None] * q_blocks + blocks[None, :])
    return gather_rows(xp, items._replace(row_starts=starts), index.reshape(-1), capacity)


def shard_capacity(
    capacity: int, planes: int, grid: tuple[int, int], shards: int, assignment: Assignment
) -> int:
    """Return an upper bound on the items of a shard.

    With "work", shards differ by less than the heaviest query block, so the bound is the mean plus
    one such block. With "zigzag", all work may be in one shard. `capacity` is that of all lists,
    `grid` the number of query and kv blocks.
    """
    q_blocks, kv_blocks = grid
    widest = planes * kv_blocks
    limit = min(capacity, -(-q_blocks // shards) * widest)
    return max(1, min(limit, -(-capacity // shards) + widest) if assignment == "work" else limit)


@dataclasses.dataclass(frozen=True, eq=False)
class ContextWork:
    """Listed blocks by shard and kv chunk, for contiguous and balanced assignments."""

    before: Int[np.ndarray, "shards shards"]  # [shards, chunks] with contiguous queries and keys
    # [shards, chunks] with assigned queries and zigzag keys
    after: Int[np.ndarray, "shards shards"]

    @property
    def excess_before(self) -> float:
        """Max / mean work of shards with contiguous tokens."""
        return _imbalance(self.before)

    @property
    def excess_after(self) -> float:
        """Max / mean work of shards with assigned query blocks."""
        return _imbalance(self.after)

    @property
    def ring_excess_before(self) -> float:
        """Max / mean work of a ring with contiguous tokens, summed over steps."""
        return _ring_imbalance(self.before)

    @property
    def ring_excess_after(self) -> float:
        """Max / mean work of a ring with assigned queries and zigzag keys."""
        return _ring_imbalance(self.after)

    def __str__(self) -> str:
        return (
            f"max / mean work of {len(self.before)} shards: {self.excess_before:.3f} contiguous,"
            f" {self.excess_after:.3f} balanced; ring: {self.ring_excess_before:.3f} and"
            f" {self.ring_excess_after:.3f}"
        )


def context_work(layout: BlockLayout, shards: int, assignment: Assignment = "work") -> ContextWork:
    """Count the blocks of every shard, with contiguous and with balanced assignment.

    Args:
        layout: concrete layout of all heads and batch elements of a shard.
        shards: size of the context axis.
        assignment: method of `assign_blocks`.

    Example:
        >>> from xsake.masks import Causal
        >>> print(context_work(BlockLayout.from_mask(Causal(), q_tokens=8192), 4))
        max / mean work of 4 shards: 1.738 contiguous, 1.000 balanced; ring: 1.738 and 1.000
    """
    starts, kv_block = np.asarray(layout.row_starts), np.asarray(layout.kv_block)
    row = item_rows(np, starts, kv_block.size)[: starts[-1]]
    q_block, kv_block = row % layout.q_blocks, kv_block[: row.size]
    each_q, each_kv = (-(-n // shards) for n in (layout.q_blocks, layout.kv_blocks))
    owner = np.empty(layout.q_blocks, np.int64)
    work = np.bincount(q_block, minlength=layout.q_blocks)
    for shard, blocks in enumerate(assign_blocks(np, work, shards, assignment)):
        owner[blocks[blocks != EMPTY]] = shard

    def count(shard, chunk):
        table = np.zeros((shards, shards), np.int64)
        np.add.at(table, (shard, chunk), 1)
        return table

    return ContextWork(
        before=count(q_block // each_q, kv_block // each_kv),
        after=count(owner[q_block], zigzag_shard(np, kv_block, shards)),
    )


def _imbalance(work: np.ndarray) -> float:
    total = int(work.sum())
    return float(work.sum(1).max() * work.shape[0] / total) if total else 1.0


def _ring_imbalance(work: np.ndarray) -> float:
    """Shard s computes chunk s - t in step t; a step takes as long as its slowest shard."""
    shards, total = work.shape[0], int(work.sum())
    shard = np.arange(shards)
    steps = [work[shard, (shard - step) % shards].max() for step in range(shards)]
    return float(sum(steps) * shards / total) if total else 1.0


def check_num_blocks(q_blocks: int, shards: int) -> None:
    """Raise if there are fewer query blocks than shards."""
    if q_blocks < shards:
        raise ArgumentError(
            "context-blocks",
            "the sequence has fewer query blocks than the context axis has shards",
            got=f"{q_blocks} query blocks, {shards} shards",
            expected=f"at least {shards} query blocks",
            fix="use smaller blocks or fewer context shards",
        )


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
            "parts-multiple", "the number of items is not a multiple of the parts",
            got=f"{work.size} items, {parts} parts", expected="a multiple of the parts",
        )  # fmt: skip
    if not np.isfinite(work).all() or (work < 0).any():
        raise ArgumentError(
            "work-values",
            "work must be finite and non-negative",
            got=f"{work.min()} to {work.max()}",
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
