"""Append-only metrics file of a run: one JSON line per step; may be read during the run.

A restored run writes its first step; earlier lines of that step and of later ones are superseded.
"""

import collections
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

from xsake._io import JsonlLog
from xsake.errors import ArgumentError
from xsake.observability.metrics import rename_metrics

MAX_STEP = 2**53  # integers above it are inexact in float64 and JavaScript
_MAX_BUFFERED_LINES = 100_000  # while the disk is full


class MetricsFile:
    """Writer of a metrics file; every line is written immediately and atomically.

    A full disk does not stop the run: lines are buffered and written later.

    Args:
        path: None (all processes but the primary one) disables writing.
    """

    def __init__(self, path: Path | None):
        self._log = None if path is None else JsonlLog(path)
        self._buffer: collections.deque[str] = collections.deque(maxlen=_MAX_BUFFERED_LINES)
        self._has_warned = False

    def start_attempt(self, step: int, **about: Any) -> None:
        """Write the first step of an attempt, and facts such as the number of steps."""
        self._put({"event": "began", "from_step": step, "wall": round(time.time(), 3), **about})

    def end_attempt(self, ending: str) -> None:
        """Write the end of an attempt, such as "done" or "stopped"."""
        self._put({"event": "ended", "ending": ending, "wall": round(time.time(), 3)})

    def add(self, step: int, **values: Any) -> None:
        """Write the metrics of a step."""
        self._put({"step": step, **values})

    def _put(self, values: dict[str, Any]) -> None:
        if self._log is None:
            return
        self._buffer.append(json.dumps(replace_nonfinite(values)))
        try:
            while self._buffer:
                self._log.append(self._buffer[0])
                self._buffer.popleft()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = f"cannot write metrics, will retry: {error.strerror}"
                warnings.warn(message, RuntimeWarning, stacklevel=3)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the current lines of a metrics file: the last result of each step.

    Events, truncated lines, and lines superseded by a later attempt are left out.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArgumentError(
            "metrics-unreadable", "cannot read metrics", got=f"{path}: {error.strerror}"
        ) from error
    current: list[dict[str, Any]] = []
    for line in filter(None, map(parse_line, text.split(b"\n"))):
        if line.get("event") == "began":
            while current and current[-1]["step"] >= line["from_step"]:
                current.pop()
        elif "event" not in line:
            current.append(line)
    return current


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a step or an event; None if it is invalid."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    step = value.get("from_step") if "event" in value else value.get("step")
    return rename_metrics(value) if is_step(step) or value.get("event") == "ended" else None


def is_step(value: Any) -> bool:
    """Whether a JSON value is the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_STEP


def replace_nonfinite(value: Any) -> Any:
    """Replace non-finite numbers, which JSON cannot represent, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [replace_nonfinite(part) for part in value]
    if isinstance(value, dict):
        return {name: replace_nonfinite(part) for name, part in value.items()}
    return value
