"""A run as the dashboard sees it: its index, its newest numbers, its state and its problems."""

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
from xsake.observability.metrics import METRICS, MOST_SERIES
from xsake.server.index import Index, View
from xsake.server.lines import is_number, read_line
from xsake.server.registry import Thing, read_document
from xsake.server.tail import Tail, open_regular, stat_regular

State = Literal["waiting", "running", "stale", "done", "stopped", "failed", "unreadable"]
STATES: tuple[State, ...] = (
    "waiting", "running", "stale", "done", "stopped", "failed", "unreadable",
)  # fmt: skip
_TAIL = 2**22  # bytes at the end of a file that the newest numbers are looked for in
_LAST_LINES = 128  # of them, which are all parsed
_RARE = (b'"event"', b'"validation_loss"', b"[[")
_LINES = 256  # fed at once, so that requests have their turn
_MOST_SHOWN = 64  # lines of one live update
_GOODPUT_SECONDS = 10.0
_MAX_GOODPUT = 2**26  # bytes
_MIN_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0
_LOG = logging.getLogger(__name__)


class UnreadableRunError(Exception):
    """A run cannot be read now; the reason is its `problem`."""


class Run:
    """One run; a single thread calls `advance`, any thread the rest.

    Whatever its files have, only this run suffers: an error makes it unreadable, with a reason,
    until a later attempt succeeds.

    Args:
        thing: where it is.
        stale_seconds: silence after which it counts as stale.
        index_folder: for its index, which need not exist yet; not in the run's own folder.
    """

    def __init__(self, thing: Thing, stale_seconds: float, index_folder: Path):
        self.id, self.folder, self.name = thing.id, thing.path, thing.name
        self._stale_seconds, self._index_folder = stale_seconds, index_folder
        self.metrics = self.folder / "metrics.jsonl"
        self._lock = threading.Lock()
        self._index: Index | None = None
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
        """Write down what the index has not on disk yet."""
        with self._lock:
            self._forget_index()

    def _open(self) -> Index:
        """The index, after the newest numbers; a file that became another one is read anew."""
        self._read_tail()
        return Index(self.metrics, self._index_folder)

    def _forget_index(self) -> None:
        index, self._index = self._index, None
        if index is not None:
            with contextlib.suppress(OSError):
                index.close()

    def _read_tail(self) -> None:
        """Take the newest numbers, however long the file is, from its first line and its end.

        Of the end all of the last lines are parsed; of those before, the ones that may have what
        not every line has: events, validation losses and numbers by head.
        """
        size = self._tail_end = stat_regular(self.metrics).st_size
        texts: list[bytes] = []
        with open_regular(self.metrics) as file:
            for begin, end in ((0, 1), (max(0, size - _TAIL), size)):
                tail = Tail(file, begin, is_inside_long=begin > 0)
                while tail.place < end and (text := tail.next_line()) is not None:
                    texts.append(text)
        for number, text in enumerate(texts, start=_LAST_LINES - len(texts)):
            if number >= 0 or any(word in text for word in _RARE):
                line = read_line(text)
                if line is not None:
                    self._take(line.fields)

    def advance(self) -> list[dict[str, Any]]:
        """Read a portion of what is new; return the newest lines of steps.

        After an error the run is left alone for a while, longer after every further one.
        """
        if time.monotonic() < self._retry_at:
            return []
        try:
            lines = self._advance()
            self._refresh_goodput()
        except Exception as error:  # noqa: BLE001 (a file of one run must not stop the others)
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
            self._forget_index()
            self._signature, self.is_caught_up = (), False
            if not isinstance(error, OSError):
                # The error may come from the index itself: it is built again.
                shutil.rmtree(self._index_folder, ignore_errors=True)
        problem = _reason(error)
        if problem != self.problem:
            unforeseen = None if isinstance(error, OSError) else error
            _LOG.warning("run %s cannot be read: %s", self.id, problem, exc_info=unforeseen)
        self.problem = problem

    def _advance(self) -> list[dict[str, Any]]:
        with self._lock:
            found = stat_regular(self.metrics)
            signature = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if self._index is None:
                self._index = self._open()
                return []  # other runs have their first turn before this one is read on
            if signature == self._signature and self.is_caught_up:
                return []
            index, self._signature = self._index, signature
            lines = index.feed(_LINES)
            was_caught_up = self.is_caught_up
            self.is_caught_up = index.is_at_end or index.place >= found.st_size
            self.dropped_lines, self.dropped_values = index.dropped_lines, index.dropped_values
            self.skipped_total = round(index.total_skipped())
            self.num_rebuilt += index.num_rebuilt
            index.num_rebuilt = 0
            if index.place > self._tail_end:
                for line in lines:
                    self._take(line)
        if not was_caught_up and not self.is_caught_up:
            return []  # an old file, of which live updates would be old too
        return [_shown(line) for line in lines if "event" not in line][-_MOST_SHOWN:]

    def _take(self, line: dict[str, Any]) -> None:
        """Use a validated line for the newest numbers."""
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
                        self.latest[name] = _number(line[name])

    @property
    def state(self) -> State:
        """Whether it still lives, as far as its file tells."""
        if self.problem is not None:
            return "unreadable"
        if self._ending is not None:
            return self._ending
        if self._step < 0 and not self._wall:
            return "waiting"
        return "running" if time.time() - self.last_told < self._stale_seconds else "stale"

    @property
    def last_told(self) -> float:
        """When it last told something, seconds since 1970."""
        with contextlib.suppress(OSError):
            return stat_regular(self.metrics).st_mtime
        return self._wall

    def _refresh_goodput(self) -> None:
        """Read the share of time that new steps took, if the file has changed."""
        begin, path = time.monotonic(), self.folder / "goodput.jsonl"
        if begin < self._goodput_due:
            return
        self._goodput_due = begin + _GOODPUT_SECONDS
        share = None
        with contextlib.suppress(ArgumentError, OSError):
            found = stat_regular(path)
            signature = (found.st_size, found.st_mtime_ns)
            if signature == self._goodput_signature:
                return
            self._goodput_signature = signature
            if found.st_size <= _MAX_GOODPUT:
                with open_regular(path) as file:  # and not again by its name, which may be a link
                    share = goodput.report(Path(f"/dev/fd/{file.fileno()}")).share
        self.goodput = _number(share) if share is not None else None
        # A long file is read again the more rarely, the longer that takes.
        self._goodput_due = max(self._goodput_due, begin + 100 * (time.monotonic() - begin))

    def summary(self) -> dict[str, Any]:
        """What a list of runs says about it."""
        return {
            "id": self.id,
            "name": self._about.get("name") or _safe(self.name),
            "folder": _safe(self.name),
            "state": self.state,
            "step": self._step,
            "steps": self._about.get("steps"),
            "last_told": round(self.last_told, 3),
            "loss": self.latest.get("loss"),
            "tokens_per_second": self.latest.get("tokens_per_second"),
            "is_indexed": self.is_caught_up,
            "problem": self.problem,
            "dropped_lines": self.dropped_lines,
            "dropped_values": self.dropped_values,
        }

    def details(self) -> dict[str, Any]:
        """All that is known of it but its history."""
        with self._lock:
            names = [] if self._index is None else self._index.columns.names[:MOST_SERIES]
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
                return _without_paths(config)
        return None

    def view(self, names: list[str], begin: int, end: int, points: int) -> View:
        """Return some series, for a screen; see `Index.view`.

        Raises:
            UnreadableRunError: the run cannot be read now.
        """
        if self.problem is not None and time.monotonic() < self._retry_at:
            raise UnreadableRunError(self.problem)
        try:
            with self._lock:
                if self._index is None:
                    self._index = self._open()
                return self._index.view(names, begin, end, points)
        except Exception as error:  # a file of one run must not end in a 500
            self._fail(error)
            raise UnreadableRunError(self.problem) from error


def _reason(error: Exception) -> str:
    """Why a run cannot be read, without saying where it lies."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return f"{type(error).__name__}, see the log of the server"


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    """The single numbers of a line, and which numbers by head it has."""
    names = [name for name in METRICS if name in line]
    found: dict[str, Any] = {"step": line["step"]}
    found |= {name: _number(line[name]) for name in names if not METRICS[name].axes}
    if heads := [name for name in names if METRICS[name].axes]:
        found["heads"] = heads
    return found


def _number(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._ -]", "_", name)[:64]


def _without_paths(value: Any, depth: int = 0) -> Any:
    """A setting without where things lie: of a path only its last part is kept."""
    if isinstance(value, str):
        last = value.replace("\\", "/").rstrip("/").rpartition("/")[2][:256]
        return last.encode("utf-8", "replace").decode()
    if isinstance(value, dict) and depth < 8:
        return {
            str(key)[:64].encode("utf-8", "replace").decode(): _without_paths(part, depth + 1)
            for key, part in value.items()
        }
    if isinstance(value, list) and depth < 8:
        return [_without_paths(part, depth + 1) for part in value[:1024]]
    is_plain = value is None or isinstance(value, bool)
    return value if is_plain or (is_number(value) and math.isfinite(value)) else None
