"""Owns the index tables that answer for rectangles of segment ids in constant time."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Int

from xsake.masks.arrays import UNBOUNDED, Codes, look_up
from xsake.masks.coverage import ALL, NONE, SOME, UNKNOWN, Rectangles


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
    """Tables of one array of ids, each with one more entry for all positions past its end.

    A segment is *shared* if its id occurs on both sides; ranks number the shared segments in
    order of appearance.
    """

    ids: Int[np.ndarray, " n"]  # padding replaced by a number the other side never has
    run_last: Int[np.ndarray, " n"]  # last position of the run of equal ids around a position
    next_shared: Int[np.ndarray, " n"]  # nearest position of a shared segment, here or after
    rank_from: Int[np.ndarray, " n"]  # rank at that position
    rank_until: Int[np.ndarray, " n"]  # rank at the nearest such position, here or before
    is_ordered: bool  # ranks never fall along the array

    @classmethod
    def of(cls, ids: np.ndarray, ranks: np.ndarray, padding: int) -> "Side":
        """Tables from ids and their ranks, -1 where a position has no shared segment."""
        ids = np.append(np.where(ids < 0, padding, ids), padding).astype(np.int32)
        ranks = np.append(ranks, -1)
        positions = np.arange(ids.size)
        ends = np.append(np.flatnonzero(np.diff(ids)), UNBOUNDED)
        is_shared = ranks >= 0
        place = np.where(is_shared, positions, UNBOUNDED)
        next_shared = np.minimum.accumulate(place[::-1])[::-1]
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
        """Ids of positions; those past the end are padding."""
        return look_up(xp, self.ids, self.index(xp, positions))

    def index(self, xp: ModuleType, positions: Any) -> Any:
        """Positions as indices of the tables."""
        return xp.minimum(positions, self.ids.size - 1)


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentRuns:
    """Both sides of a segment mask, ready for questions about rectangles."""

    q: Side
    kv: Side

    @classmethod
    def of(cls, q_ids: np.ndarray, kv_ids: np.ndarray) -> "SegmentRuns":
        """Tables for ids per query and per key position."""
        shared = np.intersect1d(q_ids[q_ids >= 0], kv_ids)
        # Ranks follow the order of appearance, so document ids need not be ascending.
        found, first_seen = np.unique(q_ids, return_index=True)
        appearance = first_seen[np.searchsorted(found, shared)]
        rank_of = np.empty(shared.size, np.int64)
        rank_of[np.argsort(appearance)] = np.arange(shared.size)

        def ranks(ids: np.ndarray) -> np.ndarray:
            if not shared.size:
                return np.full(ids.size, -1)
            slot = np.minimum(np.searchsorted(shared, ids), shared.size - 1)
            return np.where(shared[slot] == ids, rank_of[slot], -1)

        return cls(q=Side.of(q_ids, ranks(q_ids), -1), kv=Side.of(kv_ids, ranks(kv_ids), -2))

    def coverage(self, xp: ModuleType, area: Rectangles) -> Codes:
        """`Coverage` codes; UNKNOWN only if shared segments interleave or change their order."""
        q_start, q_stop = self.q.index(xp, area.q_first), self.q.index(xp, area.q_last)
        kv_start, kv_stop = self.kv.index(xp, area.kv_first), self.kv.index(xp, area.kv_last)
        every = (
            (look_up(xp, self.q.ids, q_start) == look_up(xp, self.kv.ids, kv_start))
            & (look_up(xp, self.q.run_last, q_start) >= area.q_last)
            & (look_up(xp, self.kv.run_last, kv_start) >= area.kv_last)
        )
        none = (look_up(xp, self.q.next_shared, q_start) > area.q_last) | (
            look_up(xp, self.kv.next_shared, kv_start) > area.kv_last
        )
        is_ordered = self.q.is_ordered and self.kv.is_ordered
        if is_ordered:
            # A stretch then holds every rank between its first and its last one.
            q_ranks = look_up(xp, self.q.rank_from, q_start), look_up(xp, self.q.rank_until, q_stop)
            kv_from = look_up(xp, self.kv.rank_from, kv_start)
            kv_until = look_up(xp, self.kv.rank_until, kv_stop)
            none = none | (q_ranks[0] > kv_until) | (kv_from > q_ranks[1])
        between = SOME if is_ordered else UNKNOWN
        return xp.where(every, ALL, xp.where(none, NONE, between))
