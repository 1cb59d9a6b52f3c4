"""Track restarts of a run to decide which metrics lines are current."""

import bisect
from collections.abc import Sequence

from xsake.server.lines import MAX_STEP


class Restarts:
    """Restarts of a run.

    A line is superseded if a later attempt starts at its step or an earlier one. The entries form
    a stack with increasing offsets and steps.

    Args:
        entries: (offset of the event, first step of the attempt), in order.

    Example:
        >>> restarts = Restarts([(0, 0), (100, 50)])
        >>> restarts.add(200, 20), restarts.entries
        (True, [(0, 0), (200, 20)])
        >>> restarts.is_current(150, 10), restarts.is_current(150, 60), restarts.next_offset(150)
        (True, False, 200)
    """

    def __init__(self, entries: Sequence[tuple[int, int]] = ()):
        self.entries = list(entries)

    def add(self, offset: int, step: int) -> bool:
        """Add an attempt; return False if nothing changes."""
        index = bisect.bisect_left(self.entries, (offset, -1))
        if index < len(self.entries) and self.entries[index][1] <= step:
            return False
        begin = index
        while begin and self.entries[begin - 1][1] >= step:
            begin -= 1
        self.entries[begin:index] = [(offset, step)]
        return True

    def is_current(self, offset: int, step: int) -> bool:
        """Whether a line is not superseded."""
        index = bisect.bisect_right(self.entries, (offset, MAX_STEP))
        return index == len(self.entries) or step < self.entries[index][1]

    def next_offset(self, offset: int) -> int:
        """Return the offset of the next current line after a superseded one."""
        return self.entries[bisect.bisect_right(self.entries, (offset, MAX_STEP))][0]
