"""State of one run: index, latest metrics, status and errors."""

import contextlib
import json
import logging
import math
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from xsake.errors import ArgumentError
from xsake.observability import goodput
from xsake.observability.metrics import MAX_SERIES, METRICS
from xsake.server.index import MetricsIndex, SeriesView
from xsake.server.lines import is_number, read_line
from xsake.server.registry import Artifact, read_document
from xsake.server.tail import LineReader, open_regular, stat_regular

State = Literal["waiting", "running", "stale", "done", "stopped", "failed", "unreadable"]
STATES: tuple[State, ...] = (
    "waiting", "running", "stale", "done", "stopped", "failed", "unreadable",
)  # fmt: skip
_TAIL = 2**22  # bytes at the end of a file that are searched for the latest metrics
_LAST_LINES = 128  # of the tail that are always parsed
_RARE_FIELDS = (b'"event"', b'"validation_loss"', b"[[")
_CHUNK_LINES = 256  # per call, so that requests are not delayed
_MAX_UPDATE_LINES = 64
_GOODPUT_SECONDS = 10.0
_MAX_GOODPUT = 2**26  # bytes
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0
_LOG = logging.getLogger(__name__)


class UnreadableRunError(Exception):
    """The run is unreadable; its `problem` has the reason."""


class Run:
    """One run. A single thread calls `advance`; other methods are thread-safe.

    An error in its files marks this run as unreadable until a retry succeeds; others are not
    affected.

    Args:
        artifact: of the run.
        stale_seconds: time without updates after which it is stale.
        index_folder: folder of its index, outside of the run's folder; may not exist yet.
    """

    def __init__(self, artifact: Artifact, stale_seconds: float, index_folder: Path):
        self.id, self.folder, self.name = artifact.id, artifact.path, artifact.name
        self._stale_seconds, self._index_folder = stale_seconds, index_folder
        self.metrics = self.folder / "metrics.jsonl"
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

    def close(self) -> None:
        """Flush the index to disk."""
        with self._lock:
            self._close_index()

    def _open(self) -> MetricsIndex:
        """Read the latest metrics and open the index."""
        self._read_tail()
        return MetricsIndex(self.metrics, self._index_folder)

    def _close_index(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            with contextlib.suppress(OSError):
                index.close()

    def _read_tail(self) -> None:
        """Read the latest metrics from the first line and the tail of the file.

        The last lines are all parsed; earlier lines of the tail only if they may have events,
        validation losses or values by head.
        """
        size = self._tail_end = stat_regular(self.metrics).st_size
        texts: list[bytes] = []
        with open_regular(self.metrics) as file:
            for begin, end in ((0, 1), (max(0, size - _TAIL), size)):
                reader = LineReader(file, begin, is_inside_long=begin > 0)
                while reader.offset < end and (text := reader.next_line()) is not None:
                    texts.append(text)
        for number, text in enumerate(texts, start=_LAST_LINES - len(texts)):
            if number >= 0 or any(field in text for field in _RARE_FIELDS):
                line = read_line(text)
                if line is not None:
                    self._apply(line.fields)

    def advance(self) -> list[dict[str, Any]]:
        """Read a chunk of new lines; return the newest lines of steps.

        Errors are retried with exponential backoff.
        """
        if time.monotonic() < self._retry_at:
            return []
        try:
            lines = self._advance()
            self._refresh_goodput()
        except Exception as error:  # noqa: BLE001 (an error in one run must not stop the others)
            self._fail(error)
            return []
        self.problem, self._retry_seconds = None, 0.0
        return lines

    def _fail(self, error: Exception) -> None:
        self.num_failures += 1
        self._retry_seconds = min(
            max(_MIN_RETRY_SECONDS, 2 * self._retry_seconds), _MAX_RETRY_SECONDS
        )
        self._retry_at = time.monotonic() + self._retry_seconds
        with self._lock:
            self._close_index()
            self._signature, self.is_caught_up = (), False
            if not isinstance(error, OSError):
                # The index itself may be damaged: rebuild it.
                shutil.rmtree(self._index_folder, ignore_errors=True)
        problem = _describe_error(error)
        if problem != self.problem:
            unexpected = None if isinstance(error, OSError) else error
            _LOG.warning("run %s is unreadable: %s", self.id, problem, exc_info=unexpected)
        self.problem = problem

    def _advance(self) -> list[dict[str, Any]]:
        with self._lock:
            status = stat_regular(self.metrics)
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
            self.dropped_lines, self.dropped_values = index.dropped_lines, index.dropped_values
            self.skipped_total = round(index.count_skips())
            self.num_rebuilt += index.num_rebuilt
            index.num_rebuilt = 0
            if index.offset > self._tail_end:
                for line in lines:
                    self._apply(line)
        if not was_caught_up and not self.is_caught_up:
            return []  # lines of the backlog are not live updates
        return [_live_update(line) for line in lines if "event" not in line][-_MAX_UPDATE_LINES:]

    def _apply(self, line: dict[str, Any]) -> None:
        """Update the latest metrics from a validated line."""
        if math.isfinite(line.get("wall", math.nan)):
            self._wall = max(self._wall, float(line["wall"]))
        match line.get("event"):
            case "began":
                self._about, self._ending = line, None
                self._step = min(self._step, line["from_step"] - 1)
            case "ended":
                self._ending = line["ending"]
            case None:
                self._step = max(self._step, line["step"])
                for name in METRICS.keys() & line.keys():
                    if METRICS[name].axes:
                        self.matrices[name] = line["step"], line[name]
                    else:
                        self.latest[name] = _finite_or_none(line[name])

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
            return stat_regular(self.metrics).st_mtime
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
        self.goodput = _finite_or_none(share) if share is not None else None
        # Reading takes at most 1% of the time.
        self._goodput_due = max(self._goodput_due, begin + 100 * (time.monotonic() - begin))

    def summary(self) -> dict[str, Any]:
        """Return the summary of the run for lists."""
        return {
            "id": self.id,
            "name": self._about.get("name") or _sanitize_name(self.name),
            "folder": _sanitize_name(self.name),
            "state": self.state,
            "step": self._step,
            "steps": self._about.get("steps"),
            "last_update_time": round(self.last_update_time, 3),
            "loss": self.latest.get("loss"),
            "tokens_per_second": self.latest.get("tokens_per_second"),
            "is_indexed": self.is_caught_up,
            "problem": self.problem,
            "dropped_lines": self.dropped_lines,
            "dropped_values": self.dropped_values,
        }

    def details(self) -> dict[str, Any]:
        """Return all fields except the series."""
        with self._lock:
            names = [] if self._index is None else self._index.columns.names[:MAX_SERIES]
        return {
            **self.summary(),
            "latest": dict(self.latest),
            "heads": sorted(self.matrices),
            "series": list(names),
            "goodput": self.goodput,
            "skipped_total": self.skipped_total,
            "config": self._config(),
        }

    def _config(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads(read_document(self.folder / "config.json", 2**20))
            if isinstance(config, dict):
                return _strip_paths(config)
        return None

    def view(self, names: list[str], begin: int, end: int, points: int) -> SeriesView:
        """Return downsampled series; see `MetricsIndex.view`.

        Raises:
            UnreadableRunError: the run is unreadable.
        """
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


def _describe_error(error: Exception) -> str:
    """Describe an error without paths."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{type(error).__name__}, see the log of the server"


def _live_update(line: dict[str, Any]) -> dict[str, Any]:
    """Return the scalars of a line and the names of its matrices."""
    names = [name for name in METRICS if name in line]
    update: dict[str, Any] = {"step": line["step"]}
    update |= {name: _finite_or_none(line[name]) for name in names if not METRICS[name].axes}
    if heads := [name for name in names if METRICS[name].axes]:
        update["heads"] = heads
    return update


def _finite_or_none(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None


def _sanitize_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._ -]", "_", name)[:64]


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
