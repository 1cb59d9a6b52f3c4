"""Where attempts of a run began, and so which lines of its metrics still count."""

import bisect
from collections.abc import Sequence

from xsake.server.lines import MAX_STEP


class Restarts:
    """Where attempts of a run began, and which lines before them no longer count.

    A line counts unless a later attempt began at its step or an earlier one. Of the attempts only
    those matter that no later one undercuts: a stack whose places and steps both rise.

    Args:
        entries: (place of the event, first step that is done again), in order.

    Example:
        >>> restarts = Restarts([(0, 0), (100, 50)])
        >>> restarts.add(200, 20), restarts.entries
        (True, [(0, 0), (200, 20)])
        >>> restarts.counts(150, 10), restarts.counts(150, 60), restarts.next_place(150)
        (True, False, 200)
    """

    def __init__(self, entries: Sequence[tuple[int, int]] = ()):
        self.entries = list(entries)

    def add(self, place: int, step: int) -> bool:
        """Note an attempt; False if it is known or changes nothing."""
        at = bisect.bisect_left(self.entries, (place, -1))
        if at < len(self.entries) and self.entries[at][1] <= step:
            return False
        begin = at
        while begin and self.entries[begin - 1][1] >= step:
            begin -= 1
        self.entries[begin:at] = [(place, step)]
        return True

    def counts(self, place: int, step: int) -> bool:
        """Whether a line of a step that stands at a place still counts."""
        at = bisect.bisect_right(self.entries, (place, MAX_STEP))
        return at == len(self.entries) or step < self.entries[at][1]

    def next_place(self, place: int) -> int:
        """Where lines count again, after one that does not."""
        return self.entries[bisect.bisect_right(self.entries, (place, MAX_STEP))][0]
