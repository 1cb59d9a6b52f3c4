"""Asynchronous trackers: one thread per tracker; the run never waits for them."""

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from xsake.observability.metrics import flatten_metrics
from xsake.observability.tracker import TrackerFactory

FINISH_SECONDS = 5.0
INTERVAL_SECONDS = 1.0
"""Interval of the worker threads; a wake-up per step would compete with the training thread."""
_MAX_QUEUED = 4096  # records; the oldest are dropped
_MAX_FAILURES = 3  # in a row; the tracker is then disabled
_LOG = logging.getLogger(__name__)

_Record = tuple[int, Mapping[str, Any]]


class AsyncTrackers:
    """Log records to trackers without blocking.

    A slow tracker loses its oldest queued records, one that fails repeatedly is disabled, and one
    that hangs at the end is abandoned. Lost records are counted; the metrics file has all of them.

    Each tracker is called once per interval, with the newest of the records that have the same
    names.

    Args:
        trackers: factories by name, called in the worker threads.
        seconds: interval; 0 logs every record at once.
        capacity: maximum number of queued records per tracker.
    """

    def __init__(
        self,
        trackers: Mapping[str, TrackerFactory],
        *,
        seconds: float = INTERVAL_SECONDS,
        capacity: int = _MAX_QUEUED,
    ):
        self._workers = [
            _TrackerWorker(name, make, seconds, capacity) for name, make in trackers.items()
        ]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue a record for every tracker.

        Args:
            step: number of the step.
            values: as in the metrics file; must not be modified afterwards.
        """
        for worker in self._workers:
            worker.put((step, values))

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Flush and finish all trackers.

        Args:
            seconds: total timeout; trackers that are not finished by then are abandoned.
        """
        end = time.monotonic() + seconds
        for worker in self._workers:
            worker.put(None)
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))

    @property
    def dropped(self) -> dict[str, int]:
        """Number of lost records by tracker."""
        return {worker.name: worker.dropped for worker in self._workers}


class _TrackerWorker:
    """One tracker with its thread and queue."""

    def __init__(self, name: str, make: TrackerFactory, seconds: float, capacity: int):
        self.name, self.dropped, self._seconds = name, 0, seconds
        self._make, self._is_disabled = make, False
        self._queue: queue.Queue[_Record | None] = queue.Queue(capacity)
        self._closing = threading.Event()
        # A daemon, so that a hanging tracker does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: _Record | None) -> None:
        if self._is_disabled:
            self.dropped += record is not None
            return
        if record is None:
            self._closing.set()
        while True:
            try:
                return self._queue.put_nowait(record)
            except queue.Full:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self._queue.get_nowait()
        except queue.Empty:
            return
        if not self.dropped:
            _LOG.warning("the tracker %s is too slow: its oldest records are dropped", self.name)
        self.dropped += 1

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            _LOG.warning("the tracker %s did not finish in time and is abandoned", self.name)
        if self.dropped:
            _LOG.warning(
                "the tracker %s lost %d records; metrics.jsonl has them", self.name, self.dropped
            )

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 (tracker errors must not stop the run)
            _LOG.warning("the tracker %s is disabled: %s", self.name, _describe_error(error))
        self._is_disabled = True

    def _serve(self) -> None:
        tracker, failures, is_over = self._make(), 0, False
        while not is_over:
            records, is_over = self._take()
            for step, values in keep_latest(records) if self._seconds else records:
                try:
                    tracker.log(step, flatten_metrics(values))
                    failures = 0
                except Exception as error:
                    self.dropped, failures = self.dropped + 1, failures + 1
                    if failures == _MAX_FAILURES:
                        raise
                    _LOG.warning("the tracker %s: %s", self.name, _describe_error(error))
            self._closing.wait(self._seconds)
        tracker.finish()

    def _take(self) -> tuple[list[_Record], bool]:
        """Wait for records; return all queued ones, and whether they are the last."""
        records: list[_Record] = []
        record = self._queue.get()
        while record is not None:
            records.append(record)
            try:
                record = self._queue.get_nowait()
            except queue.Empty:
                return records, False
        return records, True


def keep_latest(records: Sequence[_Record]) -> list[_Record]:
    """Drop records whose names all occur in a later one, except those with a True value.

    Example:
        >>> keep_latest([(0, {"a": 1, "is_b": True}), (1, {"a": 2}), (1, {"c": 1}), (2, {"a": 3})])
        [(0, {'a': 1, 'is_b': True}), (1, {'c': 1}), (2, {'a': 3})]
    """
    seen: list[set[str]] = []
    newest: list[_Record] = []
    for step, values in reversed(records):
        names = set(values)
        if any(value is True for value in values.values()) or not any(names <= x for x in seen):
            newest.append((step, values))
            seen.append(names)
    return newest[::-1]


def _describe_error(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
