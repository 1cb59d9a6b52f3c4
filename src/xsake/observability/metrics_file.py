"""The file of a run's metrics: a line of JSON per step, which only grows and may be read meanwhile.

A run that goes on from a checkpoint says where it began: lines of that step and of later ones that
stand before those words no longer count.
"""

import collections
import json
import math
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xsake._io import JsonlLog
from xsake.errors import ArgumentError

_MOST_LINES = 100_000  # that wait for room on the disk


class MetricsFile:
    """Adds lines to the file of a run, each at once and whole.

    A full disk does not stop a run: what cannot be written is written later.

    Args:
        path: None writes nothing, for all processes but the first.
    """

    def __init__(self, path: Path | None):
        self._log = None if path is None else JsonlLog(path)
        self._waiting: collections.deque[str] = collections.deque(maxlen=_MOST_LINES)
        self._has_warned = False

    def began(self, step: int, **about: Any) -> None:
        """A life of the run begins; what stands there of this step and later ones is done again.

        Args:
            step: the first that it will do.
            about: whatever else a reader should know, such as the number of steps.
        """
        self._put({"event": "began", "from_step": step, "wall": _now(), **about})

    def ended(self, ending: str) -> None:
        """A life of the run ends, and says how.

        Args:
            ending: such as "done" or "stopped".
        """
        self._put({"event": "ended", "ending": ending, "wall": _now()})

    def add(self, step: int, **values: Any) -> None:
        """One more line; a reader may see it at once."""
        self._put({"step": step, **values})

    def _put(self, values: dict[str, Any]) -> None:
        if self._log is None:
            return
        self._waiting.append(json.dumps(_finite(values)))
        try:
            while self._waiting:
                self._log.append(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = f"metrics cannot be written for now: {error.strerror}"
                warnings.warn(message, RuntimeWarning, stacklevel=3)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file that count: each step as it was done last.

    A line that a crash left unfinished is no line.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArgumentError(
            "the metrics cannot be read", got=f"{path}: {error.strerror}"
        ) from error
    return counting(line for line in map(parsed, text.split(b"\n")) if line)


def counting(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines of steps without those that a later life has done again, and without events."""
    found: list[dict[str, Any]] = []
    for line in lines:
        if line.get("event") == "began":
            while found and found[-1]["step"] >= line["from_step"]:
                found.pop()
        elif "step" in line:
            found.append(line)
    return found


def parsed(line: bytes) -> dict[str, Any] | None:
    """A line of the file, of a step or an event; None for anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    step = value.get("from_step") if "event" in value else value.get("step")
    is_number = isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53
    return value if is_number or value.get("event") == "ended" else None


def _finite(value: Any) -> Any:
    """JSON has no word for numbers that are not finite: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return value


def _now() -> float:
    return round(time.time(), 3)
