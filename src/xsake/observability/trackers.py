"""Experiment trackers: one thread and one bounded queue per tracker; the run never waits."""

import collections
import functools
import importlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from xsake.errors import ArgumentError, MissingExtraError
from xsake.observability.metrics import flatten_metrics

TrackerName = Literal["wandb", "tensorboard", "trackio"]
TRACKERS: tuple[TrackerName, ...] = get_args(TrackerName)
_MIN_INTERVAL = 0.01  # seconds between two looks at a queue
_MAX_FAILURES = 3  # in a row; the tracker is then disabled
_LOG = logging.getLogger(__name__)

_Record = tuple[int, Mapping[str, Any]]


@runtime_checkable
class Tracker(Protocol):
    """Experiment tracker. All calls come from one thread, which is not the training thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step by the names of `flatten_metrics`."""

    def finish(self) -> None:
        """Flush and close."""


TrackerFactory = Callable[[], Tracker]
"""Creates a tracker; called in the thread that uses it."""


class AsyncTrackers:
    """Log records to trackers without blocking.

    A slow tracker loses its oldest queued records, one that fails repeatedly is disabled, and one
    that hangs at the end is abandoned. Lost records are counted; the metrics file has all of them.

    Args:
        trackers: factories by name, called in the worker threads.
        seconds: interval; of the records in it that have the same names, the newest is logged. 0
            logs every record.
        capacity: maximum number of queued records per tracker.
    """

    def __init__(
        self,
        trackers: Mapping[str, TrackerFactory],
        *,
        seconds: float = 1.0,
        capacity: int = 4096,
    ):
        self._workers = [_Worker(name, make, seconds, capacity) for name, make in trackers.items()]

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Queue a record for every tracker; `values` must not be modified afterwards."""
        for worker in self._workers:
            worker.put((step, values))

    def finish(self, seconds: float = 5.0) -> None:
        """Flush and finish all trackers; those that take longer in total are abandoned."""
        end = time.monotonic() + seconds
        for worker in self._workers:
            worker.closing.set()
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))

    @property
    def dropped(self) -> dict[str, int]:
        """Number of lost records by tracker."""
        return {worker.name: worker.dropped for worker in self._workers}


class _Worker:
    """One tracker with its thread and queue."""

    def __init__(self, name: str, make: TrackerFactory, seconds: float, capacity: int):
        self.name, self.dropped, self.closing = name, 0, threading.Event()
        self._make, self._seconds, self._is_disabled = make, seconds, False
        self._queue: collections.deque[_Record] = collections.deque(maxlen=capacity)
        # A daemon, so that a hanging tracker does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def put(self, record: _Record) -> None:
        if len(self._queue) == self._queue.maxlen:
            if not self.dropped:
                _LOG.warning("the tracker %s is too slow and loses its oldest records", self.name)
            self.dropped += 1
        self.dropped += self._is_disabled
        if not self._is_disabled:
            self._queue.append(record)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            _LOG.warning("the tracker %s did not finish in time and is abandoned", self.name)
            self.dropped += len(self._queue)
        if self.dropped:
            _LOG.warning(
                "the tracker %s lost %d records; metrics.jsonl has them", self.name, self.dropped
            )

    def _run(self) -> None:
        try:
            self._log_until_closed(self._make())
        except Exception as error:  # noqa: BLE001 (tracker errors must not stop the run)
            _LOG.warning("the tracker %s is disabled: %s", self.name, _describe(error))
            self._is_disabled = True
            self._queue.clear()

    def _log_until_closed(self, tracker: Tracker) -> None:
        failures, is_last = 0, False
        while not is_last:
            is_last = self.closing.is_set()
            for step, values in self._take():
                try:
                    tracker.log(step, flatten_metrics(values))
                    failures = 0
                except Exception as error:
                    self.dropped, failures = self.dropped + 1, failures + 1
                    if failures == _MAX_FAILURES:
                        raise
                    _LOG.warning("the tracker %s: %s", self.name, _describe(error))
            # No wake-up per step, which would compete with the training thread.
            self.closing.wait(max(self._seconds, _MIN_INTERVAL))
        tracker.finish()

    def _take(self) -> Iterator[_Record]:
        if self._seconds:
            yield from keep_latest([self._queue.popleft() for _ in range(len(self._queue))])
        else:
            while self._queue:
                yield self._queue.popleft()


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


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for trackers."""

    project: str
    name: str
    run_id: str  # stable across restarts
    folder: Path  # for files of trackers
    is_online: bool = False  # whether a tracker may use the network
    settings: str = "{}"  # of the run, as JSON


def make_trackers(names: Sequence[str], run: RunInfo) -> dict[str, TrackerFactory]:
    """Return the factories of some of `TRACKERS` for `AsyncTrackers`."""
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ArgumentError("tracker", "unknown tracker", got=unknown, expected=TRACKERS)
    types: dict[str, Callable[[RunInfo], Tracker]] = {
        "wandb": _Wandb, "tensorboard": _TensorBoard, "trackio": _Trackio,
    }  # fmt: skip
    return {name: functools.partial(types[name], run) for name in names}


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            "tracker-package",
            f"{module.partition('.')[0]} is not installed",
            fix="pip install 'xsake[trackers]'",
        ) from error


class _Wandb:
    """A W&B run; offline runs are stored in the run's folder for `wandb sync`."""

    def __init__(self, run: RunInfo):
        wandb = _load("wandb")
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=run.project, name=run.name, id=run.run_id, resume="allow",
            dir=str(run.folder), config=json.loads(run.settings),
            mode="online" if run.is_online else "offline",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True,
                x_disable_stats=True,
            ),
        )  # fmt: skip
        # A restored run logs steps again, which W&B's own step counter rejects.
        self._run.define_metric("training_step")
        self._run.define_metric("*", step_metric="training_step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "training_step": step})

    def finish(self) -> None:
        self._run.finish()


class _TensorBoard:
    """Event files for `tensorboard --logdir` in the run's folder, written without TensorFlow."""

    def __init__(self, run: RunInfo):
        folder = run.folder / "tensorboard"
        # SummaryWriter adds another thread and a pipe; this class already runs in a worker thread.
        self._events = _load("tensorboardX.proto.event_pb2")
        writer = _load("tensorboardX.event_file_writer").EventsWriter
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = writer(str(folder / "events"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        event = self._events.Event(wall_time=time.time(), step=step)
        for name, value in values.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._writer.write_event(event)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


class _Trackio:
    """A run in trackio's default folder; view it with `trackio show`."""

    def __init__(self, run: RunInfo):
        self._run = _load("trackio").init(
            project=run.project, name=run.name, resume="allow", embed=False,
            auto_log_cpu=False, auto_log_gpu=False, config=json.loads(run.settings),
        )  # fmt: skip

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self) -> None:
        self._run.finish()
