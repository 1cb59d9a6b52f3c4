"""Tells trackers what a run found, each from a thread of its own that the run never waits for."""

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from xsake.observability.metrics import flat
from xsake.observability.tracker import MakeTracker

FINISH_SECONDS = 5.0
PAUSE_SECONDS = 1.0
"""Between two looks at what waits: a tracker that woke with every step would take turns with it."""
_MOST_WAITING = 4096  # lines of a slow tracker; older ones are dropped
_MOST_FAILURES = 3  # in a row, then a tracker is left alone
_LOG = logging.getLogger(__name__)

_Told = tuple[int, Mapping[str, Any]]


class Fan:
    """Hands lines to trackers; returns at once, whatever they do.

    A tracker that is slow loses its oldest waiting lines, one that raises again and again is left
    alone, and one that hangs at the end is left behind. What is lost is counted, and the metrics
    file of the run has it anyway.

    Trackers are told once in a while, and then only the newest line of those that say the same
    kind of thing.

    Args:
        trackers: by name; made in their threads.
        seconds: between two times; 0 tells every line at once.
        capacity: lines that wait for each tracker.
    """

    def __init__(
        self,
        trackers: Mapping[str, MakeTracker],
        *,
        seconds: float = PAUSE_SECONDS,
        capacity: int = _MOST_WAITING,
    ):
        self._lanes = [_Lane(name, make, seconds, capacity) for name, make in trackers.items()]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """One more line for every tracker.

        Args:
            step: its number.
            values: as the metrics file has them; not changed afterwards.
        """
        for lane in self._lanes:
            lane.put((step, values))

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Let trackers end; all of them together have so long.

        Args:
            seconds: after which those that are not done are left behind.
        """
        end = time.monotonic() + seconds
        for lane in self._lanes:
            lane.put(None)
        for lane in self._lanes:
            lane.join(max(0.0, end - time.monotonic()))

    @property
    def dropped(self) -> dict[str, int]:
        """Lines that each tracker did not get."""
        return {lane.name: lane.dropped for lane in self._lanes}


class _Lane:
    """One tracker, its thread and what waits for it."""

    def __init__(self, name: str, make: MakeTracker, seconds: float, capacity: int):
        self.name, self.dropped, self._seconds = name, 0, seconds
        self._make, self._is_off = make, False
        self._queue: queue.Queue[_Told | None] = queue.Queue(capacity)
        self._ends = threading.Event()
        # A daemon, so that one that hangs does not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, told: _Told | None) -> None:
        if self._is_off:
            self.dropped += told is not None
            return
        if told is None:
            self._ends.set()
        while True:
            try:
                return self._queue.put_nowait(told)
            except queue.Full:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self._queue.get_nowait()
        except queue.Empty:
            return
        if not self.dropped:
            _LOG.warning("the tracker %s is too slow: its oldest lines are dropped", self.name)
        self.dropped += 1

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            _LOG.warning("the tracker %s does not end, and is left behind", self.name)
        if self.dropped:
            _LOG.warning(
                "the tracker %s missed %d lines, which metrics.jsonl has", self.name, self.dropped
            )

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 (whatever a tracker raises, the run goes on)
            _LOG.warning("the tracker %s is left alone: %s", self.name, _told(error))
        self._is_off = True

    def _serve(self) -> None:
        tracker, failures, is_over = self._make(), 0, False
        while not is_over:
            lines, is_over = self._waiting()
            for step, values in newest_of(lines) if self._seconds else lines:
                try:
                    tracker.log(step, flat(values))
                    failures = 0
                except Exception as error:
                    self.dropped, failures = self.dropped + 1, failures + 1
                    if failures == _MOST_FAILURES:
                        raise
                    _LOG.warning("the tracker %s: %s", self.name, _told(error))
            self._ends.wait(self._seconds)
        tracker.finish()

    def _waiting(self) -> tuple[list[_Told], bool]:
        """All lines that wait, one at least but at the end, and whether they are the last."""
        lines: list[_Told] = []
        told = self._queue.get()
        while told is not None:
            lines.append(told)
            try:
                told = self._queue.get_nowait()
            except queue.Empty:
                return lines, False
        return lines, True


def newest_of(lines: Sequence[_Told]) -> list[_Told]:
    """Lines without those of which a later one has all names; what says yes to something stays.

    Example:
        >>> newest_of([(0, {"a": 1, "is_b": True}), (1, {"a": 2}), (1, {"c": 1}), (2, {"a": 3})])
        [(0, {'a': 1, 'is_b': True}), (1, {'c': 1}), (2, {'a': 3})]
    """
    seen: list[set[str]] = []
    found: list[_Told] = []
    for step, values in reversed(lines):
        names = set(values)
        if any(value is True for value in values.values()) or not any(names <= x for x in seen):
            found.append((step, values))
            seen.append(names)
    return found[::-1]


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
