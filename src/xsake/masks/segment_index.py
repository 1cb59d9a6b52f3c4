"""Index tables that give the coverage of rectangles of segment ids in constant time."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int

from xsake.masks.arrays import UNBOUNDED, Codes, look_up
from xsake.masks.coverage import ALL, NONE, SOME, UNKNOWN, Rectangles


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentTable:
    """Tables of one array of ids, with an extra entry for positions past its end.

    A segment is *shared* if its id occurs on both sides; ranks number the shared segments in
    order of appearance.
    """

    ids: Int[np.ndarray, " n"]  # padding replaced by an id absent from the other side
    run_last: Int[np.ndarray, " n"]  # last position of the run of equal ids around a position
    next_shared: Int[np.ndarray, " n"]  # nearest position of a shared segment, at or after
    rank_from: Int[np.ndarray, " n"]  # rank at that position
    rank_until: Int[np.ndarray, " n"]  # rank at the nearest such position, at or before
    is_ordered: bool  # ranks are non-decreasing

    @classmethod
    def from_ids(cls, ids: np.ndarray, ranks: np.ndarray, padding: int) -> "SegmentTable":
        """Build tables from ids and ranks, -1 where a position has no shared segment."""
        ids = np.append(np.where(ids < 0, padding, ids), padding).astype(np.int32)
        ranks = np.append(ranks, -1)
        positions = np.arange(ids.size)
        ends = np.append(np.flatnonzero(np.diff(ids)), UNBOUNDED)
        is_shared = ranks >= 0
        shared_at = np.where(is_shared, positions, UNBOUNDED)
        next_shared = np.minimum.accumulate(shared_at[::-1])[::-1]
        previous = np.maximum.accumulate(np.where(is_shared, positions, -1))
        return cls(
            ids=ids,
            run_last=ends[np.searchsorted(ends, positions)].astype(np.int32),
            next_shared=next_shared.astype(np.int32),
            rank_from=ranks[np.minimum(next_shared, ids.size - 1)].astype(np.int32),
            rank_until=np.where(previous < 0, -1, ranks[previous]).astype(np.int32),
            is_ordered=bool(np.all(np.diff(ranks[is_shared]) >= 0)),
        )

    def id_at(self, xp: ModuleType, positions: Any) -> Any:
        """Return the ids of positions; positions past the end are padding."""
        return look_up(xp, self.ids, self.index(xp, positions))

    def index(self, xp: ModuleType, positions: Any) -> Any:
        """Return table indices of positions."""
        return xp.minimum(positions, self.ids.size - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentIndex:
    """Tables of queries and keys."""

    q: SegmentTable
    kv: SegmentTable

    @classmethod
    def from_ids(cls, q_ids: np.ndarray, kv_ids: np.ndarray) -> "SegmentIndex":
        """Build tables from segment ids per query and key position."""
        shared = np.intersect1d(q_ids[q_ids >= 0], kv_ids)
        # Ranks follow the order of appearance; ids need not be ascending.
        unique_ids, first_seen = np.unique(q_ids, return_index=True)
        appearance = first_seen[np.searchsorted(unique_ids, shared)]
        rank_of = np.empty(shared.size, np.int64)
        rank_of[np.argsort(appearance)] = np.arange(shared.size)

        def ranks(ids: np.ndarray) -> np.ndarray:
            if not shared.size:
                return np.full(ids.size, -1)
            slot = np.minimum(np.searchsorted(shared, ids), shared.size - 1)
            return np.where(shared[slot] == ids, rank_of[slot], -1)

        return cls(
            q=SegmentTable.from_ids(q_ids, ranks(q_ids), -1),
            kv=SegmentTable.from_ids(kv_ids, ranks(kv_ids), -2),
        )

    def coverage(self, xp: ModuleType, area: Rectangles) -> Codes:
        """Return codes; UNKNOWN only if shared segments interleave or differ in order."""
        q_start, q_stop = self.q.index(xp, area.q_first), self.q.index(xp, area.q_last)
        kv_start, kv_stop = self.kv.index(xp, area.kv_first), self.kv.index(xp, area.kv_last)
        full = (
            (look_up(xp, self.q.ids, q_start) == look_up(xp, self.kv.ids, kv_start))
            & (look_up(xp, self.q.run_last, q_start) >= area.q_last)
            & (look_up(xp, self.kv.run_last, kv_start) >= area.kv_last)
        )
        empty = (look_up(xp, self.q.next_shared, q_start) > area.q_last) | (
            look_up(xp, self.kv.next_shared, kv_start) > area.kv_last
        )
        is_ordered = self.q.is_ordered and self.kv.is_ordered
        if is_ordered:
            # A range then contains every rank between its first and last.
            q_ranks = look_up(xp, self.q.rank_from, q_start), look_up(xp, self.q.rank_until, q_stop)
            kv_from = look_up(xp, self.kv.rank_from, kv_start)
            kv_until = look_up(xp, self.kv.rank_until, kv_stop)
            empty = empty | (q_ranks[0] > kv_until) | (kv_from > q_ranks[1])
        between = SOME if is_ordered else UNKNOWN
        return xp.where(full, ALL, xp.where(empty, NONE, between))
