"""A run as the dashboard sees it: its index, its newest numbers, and whether it still lives."""

import contextlib
import json
import math
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal

from xsake.errors import ArgumentError
from xsake.observability import goodput
from xsake.observability.metrics import METRICS, MOST_SERIES
from xsake.observability.metrics_file import parsed
from xsake.server.index import Index, View, index_folder, only_writer
from xsake.server.registry import Thing, read_document
from xsake.server.tail import whole_lines

State = Literal["waiting", "running", "stale", "done", "stopped", "failed"]
_TAIL = 2**22  # bytes at the end of a file that the newest numbers are looked for in
_LINES = 256  # fed at once, so that requests have their turn
_MOST_SHOWN = 64  # lines of one live update
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_GOODPUT_SECONDS = 10.0


class Run:
    """One run; a single thread calls `advance`, any thread the rest.

    Args:
        thing: where it is.
        stale_seconds: silence after which it counts as stale.
    """

    def __init__(self, thing: Thing, stale_seconds: float):
        self.id, self.folder, self.name = thing.id, thing.path, thing.name
        self._stale_seconds, self._lock = stale_seconds, threading.Lock()
        self._stack = contextlib.ExitStack()
        self._index: Index | None = None
        self.latest: dict[str, Any] = {}
        self.matrices: dict[str, tuple[int, list[list[float | None]]]] = {}
        self._about: dict[str, Any] = {}
        self._ending: State | None = None
        self._step, self._wall, self._tail_end = -1, 0.0, 0
        self._goodput: tuple[float, float | None] = (-math.inf, None)
        self.is_caught_up = False

    def close(self) -> None:
        """Let go of the index."""
        self._stack.close()

    @property
    def metrics(self) -> Path:
        """Its file."""
        return self.folder / "metrics.jsonl"

    def _open(self) -> Index:
        """The index beside the metrics, or, where that cannot be, one that ends with us."""
        folder = index_folder(self.folder)
        try:
            is_ours = self._stack.enter_context(only_writer(folder))
        except OSError:
            is_ours = False
        if not is_ours:
            private = tempfile.TemporaryDirectory(prefix="xsake-index-")
            folder = Path(self._stack.enter_context(private)) / "index"
        self._read_tail()
        return Index(self.metrics, folder)

    def _read_tail(self) -> None:
        """The newest numbers, however long the file is: its first line and its end."""
        size = self._tail_end = self.metrics.stat().st_size
        for begin, end in ((0, 1), (max(0, size - _TAIL), size)):
            is_cut = begin > 0
            for _, text in whole_lines(self.metrics, begin, end):
                if not is_cut:
                    self._take(parsed(text))
                is_cut = False

    def advance(self) -> list[dict[str, Any]]:
        """Read what is new, a portion of it; the lines of steps, the newest ones if there are many.

        Raises OSError where the file cannot be read.
        """
        with self._lock:
            if self._index is None:
                self._index = self._open()
            lines = self._index.feed(_LINES)
            size = self.metrics.stat().st_size
            was_caught_up = self.is_caught_up
            self.is_caught_up = not lines or self._index.place >= size
            if self._index.place > self._tail_end:
                for line in lines:
                    self._take(line)
        if not was_caught_up and not self.is_caught_up:
            return []  # an old file: nobody wants to watch it being read
        return [_shown(line) for line in lines if "step" in line][-_MOST_SHOWN:]

    def _take(self, line: dict[str, Any] | None) -> None:
        if line is None:
            return
        wall = line.get("wall")
        if isinstance(wall, int | float) and math.isfinite(wall):
            self._wall = max(self._wall, float(wall))
        match line.get("event"):
            case "began":
                self._about, self._ending = line, None
                self._step = min(self._step, line["from_step"] - 1)
            case "ended":
                ending = line.get("ending")
                self._ending = ending if ending in ("done", "stopped", "failed") else "stopped"
            case None:
                self._step = max(self._step, line["step"])
                self._take_values(line)

    def _take_values(self, line: dict[str, Any]) -> None:
        for name, metric in METRICS.items():
            value: Any = line.get(name)
            if metric.axes:
                if _is_shown(value):
                    self.matrices[name] = line["step"], value
            elif name in line:
                self.latest[name] = value if _is_number(value) else None

    @property
    def state(self) -> State:
        """Whether it still lives, as far as its file tells."""
        if self._ending is not None:
            return self._ending
        if self._step < 0 and not self._wall:
            return "waiting"
        return "running" if time.time() - self.last_told < self._stale_seconds else "stale"

    @property
    def last_told(self) -> float:
        """When it last told something, seconds since 1970."""
        with contextlib.suppress(OSError):
            return self.metrics.stat().st_mtime
        return self._wall

    @property
    def goodput(self) -> float | None:
        """Share of its time that new steps took; None where nobody knows."""
        begin = time.monotonic()
        if begin >= self._goodput[0]:
            share = None
            path = self.folder / "goodput.jsonl"
            with contextlib.suppress(ArgumentError, OSError):
                if path.is_file() and not path.is_symlink() and path.stat().st_size < 2**26:
                    share = goodput.report(path).share
            # A long file is read again the more rarely, the longer that takes.
            took = time.monotonic() - begin
            self._goodput = begin + max(_GOODPUT_SECONDS, 100 * took), share
        return self._goodput[1]

    def skipped_total(self) -> int:
        """Updates that were refused since the run began."""
        with self._lock:
            return 0 if self._index is None else round(self._index.total("is_skipped"))

    def summary(self) -> dict[str, Any]:
        """What a list of runs says about it."""
        steps, name = self._about.get("steps"), self._about.get("name")
        is_name = isinstance(name, str) and _NAME.fullmatch(name)
        return {
            "id": self.id,
            "name": name if is_name else _safe(self.name),
            "folder": _safe(self.name),
            "state": self.state,
            "step": self._step,
            "steps": steps if isinstance(steps, int) and 0 <= steps < 2**53 else None,
            "last_told": round(self.last_told, 3),
            "loss": self.latest.get("loss"),
            "tokens_per_second": self.latest.get("tokens_per_second"),
            "is_indexed": self.is_caught_up,
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
            "skipped_total": self.skipped_total(),
            "config": self._config(),
        }

    def _config(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            config = json.loads(read_document(self.folder / "config.json", 2**20))
            if isinstance(config, dict):
                return {key: _without_paths(value) for key, value in config.items()}
        return None

    def view(self, names: list[str], begin: int, end: int, points: int) -> View:
        """Some series, for a screen; see `Index.view`."""
        with self._lock:
            if self._index is None:
                self._index = self._open()
            return self._index.view(names, begin, end, points)


def _shown(line: dict[str, Any]) -> dict[str, Any]:
    """The single numbers of a line, and which numbers by head it has."""
    single = [name for name, metric in METRICS.items() if not metric.axes and name in line]
    found: dict[str, Any] = {"step": line["step"]}
    found |= {name: line[name] if _is_number(line[name]) else None for name in single}
    if heads := [name for name, metric in METRICS.items() if metric.axes and name in line]:
        found["heads"] = heads
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _is_shown(value: Any) -> bool:
    """A matrix of numbers that is not too large to be drawn."""
    if not isinstance(value, list) or not value or len(value) > 512:
        return False
    if not all(isinstance(part, list) and 0 < len(part) <= 512 for part in value):
        return False
    is_even = len({len(part) for part in value}) == 1
    return is_even and all(x is None or _is_number(x) for part in value for x in part)


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._ -]", "_", name)[:64]


def _without_paths(value: Any, depth: int = 0) -> Any:
    """A setting without where things lie: of a path only its last part is told."""
    if isinstance(value, str):
        return value.replace("\\", "/").rstrip("/").rpartition("/")[2][:256]
    if isinstance(value, dict) and depth < 8:
        return {str(key)[:64]: _without_paths(part, depth + 1) for key, part in value.items()}
    if isinstance(value, list) and depth < 8:
        return [_without_paths(part, depth + 1) for part in value[:1024]]
    return value if value is None or isinstance(value, bool) or _is_number(value) else None
