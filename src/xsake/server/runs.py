"""Runs: index, latest metrics, status and errors of each; one thread polls all of them."""

import asyncio
import contextlib
import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from pydantic import BaseModel

from xsake.errors import ArgumentError
from xsake.observability import goodput
from xsake.server import artifacts
from xsake.server.artifacts import Artifact, open_regular, read_regular, stat_regular
from xsake.server.cache import IndexCache
from xsake.server.metrics_index import MetricsIndex, SeriesView
from xsake.server.metrics_lines import LineReader, MetricsLine, is_number, read_line
from xsake.server.settings import ServerSettings
from xsake.server.stream import Broadcaster

State = Literal["waiting", "running", "stale", "done", "stopped", "failed", "unreadable"]
STATES: tuple[State, ...] = get_args(State)
_TAIL = 2**22  # bytes at the end of a file that are searched for the latest metrics
_LAST_LINES = 128  # of the tail that are always parsed
_RARE_FIELDS = (b'"event"', b'"validation_loss"', b"[[")
_CHUNK_LINES = 256  # per call, so that requests are not delayed
_MAX_UPDATE_LINES = 64
_GOODPUT_SECONDS = 10.0
_MAX_GOODPUT = 2**26  # bytes
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0
_SCAN_INTERVAL_SECONDS = 5.0  # between two scans for new runs
_MAX_SCAN_SHARE = 0.05  # of the time: large trees are scanned less often
_CLIENT_SECONDS = 0.01  # added per client: updates of many clients cost CPU time
_BACKLOG_SECONDS = 0.25  # per round for runs with unread lines
_RESTART_SECONDS = 1.0  # delay before a dead thread is restarted
MAX_ROUND_SECONDS = 30.0  # without a finished round, data counts as stale
_LOG = logging.getLogger(__name__)


class RunSummary(BaseModel):
    """Summary of a run."""

    id: str
    name: str
    folder: str
    state: State
    step: int
    steps: int | None
    last_update_time: float
    loss: float | None
    tokens_per_second: float | None
    is_indexed: bool
    problem: str | None
    dropped_lines: int
    dropped_values: int


class RunDetails(RunSummary):
    """Details of a run."""

    latest: dict[str, float | bool | None]
    heads: list[str]
    series: list[str]
    goodput: float | None
    skipped_total: int
    config: dict[str, Any] | None


class UnreadableRunError(Exception):
    """The run is unreadable; its `problem` has the reason."""


class Run:
    """One run. A single thread calls `advance`; other methods are thread-safe.

    An error in its files marks this run as unreadable until a retry succeeds; others are not
    affected. Its index is outside of its folder.
    """

    def __init__(self, artifact: Artifact, stale_seconds: float, index_path: Path):
        self.id, self.folder, self.name = artifact.id, artifact.path, artifact.name
        self._stale_seconds, self._index_path = stale_seconds, index_path
        self._metrics = self.folder / "metrics.jsonl"
        self._lock = threading.Lock()
        self._index: MetricsIndex | None = None
        self.latest: dict[str, Any] = {}
        self.matrices: dict[str, tuple[int, np.ndarray]] = {}
        self._about: dict[str, Any] = {}
        self._ending: State | None = None
        self._step, self._wall, self._tail_end = -1, 0.0, 0
        self._signature: tuple[int, ...] = ()
        self._goodput_due, self._goodput_signature = -math.inf, (0, 0)
        self.goodput: float | None = None
        self.is_caught_up = False
        self.dropped_lines = self.dropped_values = self.num_rebuilt = self.skipped_total = 0
        self.problem: str | None = None
        self.num_failures = 0
        self._retry_seconds, self._retry_at = 0.0, -math.inf

    def _open(self) -> MetricsIndex:
        """Open the index after reading the latest metrics from the first line and the tail.

        The last lines are all parsed; earlier lines of the tail only if they may have events,
        validation losses or values by head.
        """
        size = self._tail_end = stat_regular(self._metrics).st_size
        texts: list[bytes] = []
        with open_regular(self._metrics) as file:
            for begin, end in ((0, 1), (max(0, size - _TAIL), size)):
                reader = LineReader(file, begin, is_inside_long=begin > 0)
                while reader.offset < end and (text := reader.next_line()) is not None:
                    texts.append(text)
        for number, text in enumerate(texts, start=_LAST_LINES - len(texts)):
            if number >= 0 or any(field in text for field in _RARE_FIELDS):
                line = read_line(text)
                if line is not None:
                    self._apply(line)
        return MetricsIndex(self._metrics, self._index_path)

    def advance(self) -> list[dict[str, Any]]:
        """Read a chunk of new lines; return live updates of the newest. Errors are retried."""
        if time.monotonic() < self._retry_at:
            return []
        try:
            updates = self._advance()
            self._refresh_goodput()
        except Exception as error:  # noqa: BLE001 (an error in one run must not stop the others)
            self._fail(error)
            return []
        self.problem, self._retry_seconds = None, 0.0
        return updates

    def _fail(self, error: Exception) -> None:
        self.num_failures += 1
        longer = max(_MIN_RETRY_SECONDS, 2 * self._retry_seconds)
        self._retry_seconds = min(longer, _MAX_RETRY_SECONDS)
        self._retry_at = time.monotonic() + self._retry_seconds
        is_file_error = isinstance(error, OSError)
        with self._lock:
            self._index, self._signature, self.is_caught_up = None, (), False
            if not is_file_error:  # the index itself may be damaged: rebuild it
                self._index_path.unlink(missing_ok=True)
        reason = error.strerror if is_file_error else None
        name = type(error).__name__  # the message may have a path
        problem = reason or (name if is_file_error else f"{name}, see the log of the server")
        if problem != self.problem:
            unexpected = None if is_file_error else error
            _LOG.warning("run %s is unreadable: %s", self.id, problem, exc_info=unexpected)
        self.problem = problem

    def _advance(self) -> list[dict[str, Any]]:
        with self._lock:
            status = stat_regular(self._metrics)
            signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if self._index is None:
                self._index = self._open()
                return []  # let other runs open first
            if signature == self._signature and self.is_caught_up:
                return []
            index, self._signature = self._index, signature
            lines = index.feed(_CHUNK_LINES)
            was_caught_up = self.is_caught_up
            self.is_caught_up = index.is_at_end or index.offset >= status.st_size
            self.dropped_lines = index.state.dropped_lines
            self.dropped_values = index.state.dropped_values
            self.skipped_total = round(index.count_skips())
            self.num_rebuilt += index.num_rebuilt
            index.num_rebuilt = 0
            if index.offset > self._tail_end:
                for line in lines:
                    self._apply(line)
        if not was_caught_up and not self.is_caught_up:
            return []  # lines of the backlog are not live updates
        updates = [_live_update(line) for line in lines if "event" not in line.fields]
        return updates[-_MAX_UPDATE_LINES:]

    def _apply(self, line: MetricsLine) -> None:
        """Update the latest metrics."""
        fields = line.fields
        if math.isfinite(fields.get("wall", math.nan)):
            self._wall = max(self._wall, float(fields["wall"]))
        match fields.get("event"):
            case "began":
                self._about, self._ending = fields, None
                self._step = min(self._step, fields["from_step"] - 1)
            case "ended":
                self._ending = fields["ending"]
            case None:
                self._step = max(self._step, fields["step"])
                self.latest |= {name: _finite(value) for name, value in line.scalars.items()}
                new = {name: (fields["step"], matrix) for name, matrix in line.matrices.items()}
                self.matrices |= new

    @property
    def state(self) -> State:
        """State according to its files."""
        if self.problem is not None:
            return "unreadable"
        if self._ending is not None:
            return self._ending
        if self._step < 0 and not self._wall:
            return "waiting"
        return "running" if time.time() - self.last_update_time < self._stale_seconds else "stale"

    @property
    def last_update_time(self) -> float:
        """Time of the last update in seconds since 1970."""
        with contextlib.suppress(OSError):
            return stat_regular(self._metrics).st_mtime
        return self._wall

    def _refresh_goodput(self) -> None:
        """Read goodput if the file has changed."""
        begin, path = time.monotonic(), self.folder / "goodput.jsonl"
        if begin < self._goodput_due:
            return
        self._goodput_due = begin + _GOODPUT_SECONDS
        share = None
        with contextlib.suppress(ArgumentError, OSError):
            status = stat_regular(path)
            signature = (status.st_size, status.st_mtime_ns)
            if signature == self._goodput_signature:
                return
            self._goodput_signature = signature
            if status.st_size <= _MAX_GOODPUT:
                with open_regular(path) as file:  # by descriptor: the name may become a link
                    share = goodput.read_goodput(Path(f"/dev/fd/{file.fileno()}")).share
        self.goodput = None if share is None else _finite(share)
        # Reading takes at most 1% of the time.
        self._goodput_due = max(self._goodput_due, begin + 100 * (time.monotonic() - begin))

    def summary(self) -> RunSummary:
        """Return the summary of the run for lists."""
        folder = re.sub(r"[^A-Za-z0-9._ -]", "_", self.name)[:64]
        return RunSummary(
            id=self.id, name=self._about.get("name") or folder, folder=folder, state=self.state,
            step=self._step, steps=self._about.get("steps"),
            last_update_time=round(self.last_update_time, 3), loss=self.latest.get("loss"),
            tokens_per_second=self.latest.get("tokens_per_second"), is_indexed=self.is_caught_up,
            problem=self.problem, dropped_lines=self.dropped_lines,
            dropped_values=self.dropped_values,
        )  # fmt: skip

    def details(self) -> RunDetails:
        """Return all fields except the series."""
        with self._lock:
            names = [] if self._index is None else list(self._index.state.names)
        return RunDetails(
            **self.summary().model_dump(), latest=dict(self.latest), heads=sorted(self.matrices),
            series=names, goodput=self.goodput, skipped_total=self.skipped_total,
            config=self._config(),
        )  # fmt: skip

    def _config(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads(read_regular(self.folder / "config.json", 2**20))
            if isinstance(config, dict):
                return _strip_paths(config)
        return None

    def view(self, names: list[str], begin: int, end: int, points: int) -> SeriesView:
        """Return downsampled series, as `MetricsIndex.view`; raise UnreadableRunError."""
        if self.problem is not None and time.monotonic() < self._retry_at:
            raise UnreadableRunError(self.problem)
        try:
            with self._lock:
                if self._index is None:
                    self._index = self._open()
                return self._index.view(names, begin, end, points)
        except Exception as error:  # an error in one run must not become a 500
            self._fail(error)
            raise UnreadableRunError(self.problem) from error


def _live_update(line: MetricsLine) -> dict[str, Any]:
    """Return the scalars of a line and the names of its matrices."""
    update: dict[str, Any] = {"step": line.fields["step"]}
    update |= {name: _finite(value) for name, value in line.scalars.items()}
    return update | ({"heads": list(line.matrices)} if line.matrices else {})


def _finite(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None


def _strip_paths(value: Any, depth: int = 0) -> Any:
    """Reduce paths in a configuration to their last component."""
    if isinstance(value, str):
        last = value.replace("\\", "/").rstrip("/").rpartition("/")[2][:256]
        return last.encode("utf-8", "replace").decode()
    if isinstance(value, dict) and depth < 8:
        return {
            str(key)[:64].encode("utf-8", "replace").decode(): _strip_paths(part, depth + 1)
            for key, part in value.items()
        }
    if isinstance(value, list) and depth < 8:
        return [_strip_paths(part, depth + 1) for part in value[:1024]]
    is_plain = value is None or isinstance(value, bool)
    return value if is_plain or (is_number(value) and math.isfinite(value)) else None


class Poller:
    """Poll folders and runs in a background thread, and publish updates."""

    def __init__(self, settings: ServerSettings, broadcaster: Broadcaster):
        self._settings, self._broadcaster = settings, broadcaster
        self._cache = IndexCache(settings.cache)
        self.runs: dict[str, Run] = {}
        self._scan()
        self._states: dict[str, str] = {}
        self._last_read: dict[str, float] = {}
        self._unread = set(self.runs)  # of the initial scan
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.num_failures = 0  # failed rounds and dead threads
        self.last_round: float | None = None  # time.monotonic()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the thread; updates are published in this event loop."""
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    async def supervise(self) -> None:
        """Restart the thread whenever it dies; runs until it is cancelled."""
        while True:
            await asyncio.sleep(_RESTART_SECONDS)
            if self._thread is None or self._thread.is_alive() or self._stopped.is_set():
                continue
            self.num_failures += 1
            _LOG.error("the poller thread died and is restarted")
            self.start(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(10)
        self._cache.close()

    @property
    def problem(self) -> str | None:
        """Why data may be missing or stale; None if it is current."""
        if not self.is_started:
            return "the first poll of all runs is not finished"
        seconds = time.monotonic() - (self.last_round or 0.0)
        if seconds <= MAX_ROUND_SECONDS:
            return None
        is_alive = self._thread is not None and self._thread.is_alive()
        state = "hangs" if is_alive else "has died"
        return f"the poller {state}: its last round was {seconds:.0f} s ago"

    @property
    def is_started(self) -> bool:
        """Whether every run has been read once."""
        return self.last_round is not None and not self._unread & self.runs.keys()

    @property
    def pause(self) -> float:
        """Seconds between two rounds; grows with the number of clients."""
        return max(self._settings.poll_seconds, _CLIENT_SECONDS * len(self._broadcaster))

    def _scan(self) -> None:
        begin = time.monotonic()
        self.scanned = artifacts.scan(self._settings.folders)
        current = self.scanned.artifacts["run"]
        for run_id in self.runs.keys() - current.keys():
            del self.runs[run_id]
        for run_id, artifact in current.items():
            if run_id not in self.runs:
                path = self._cache.index_path(run_id)
                self.runs[run_id] = Run(artifact, self._settings.stale_seconds, path)
        end = time.monotonic()
        self._scan_at = end + max(_SCAN_INTERVAL_SECONDS, (end - begin) / _MAX_SCAN_SHARE)

    def _run(self) -> None:
        while not self._stopped.is_set():
            pause = self.pause
            try:
                # Short pauses while reading a backlog leave time for requests.
                pause = 0.001 if self._poll_once() else pause
                self.last_round = time.monotonic()
            except Exception:  # noqa: BLE001 (logged, counted, and stale in /ready)
                self.num_failures += 1
                _LOG.exception("a polling round failed; retrying")
            self._stopped.wait(pause)

    def _poll_once(self) -> bool:
        """Read new lines of all runs; return whether some have unread lines.

        Caught-up runs come first, so that long files of others do not delay them.
        """
        if time.monotonic() >= self._scan_at:
            self._scan()
        runs = list(self.runs.values())
        for run in runs:
            if run.is_caught_up:
                self._advance(run)
        # The next round starts with the least recently read runs.
        behind = [run for run in runs if not run.is_caught_up]
        behind.sort(key=lambda run: self._last_read.get(run.id, -math.inf))
        end = time.monotonic() + _BACKLOG_SECONDS
        for run in behind:
            if time.monotonic() > end:
                break
            self._last_read[run.id] = time.monotonic()
            self._advance(run)
        return any(not run.is_caught_up and run.problem is None for run in runs)

    def _advance(self, run: Run) -> None:
        """Read new lines of one run and publish them."""
        lines = run.advance()
        self._unread.discard(run.id)
        state = run.state
        if lines or self._states.get(run.id) != state:
            self._states[run.id] = state
            data = {"summary": run.summary().model_dump(), "lines": lines}
            publish: Callable[..., None] = self._broadcaster.publish
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(publish, run.id, "update", data)
