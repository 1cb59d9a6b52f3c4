"""What a run tells while it goes: a line of JSON per step in a file, and progress for a screen."""

import collections
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xsake.bench.whole_file import write_whole
from xsake.errors import ArgumentError
from xsake.training.checkpoints import CheckpointStore, SaveFailure
from xsake.training.checkpoints.events import log_failure

_MOST_LINES = 100_000  # that wait for room on the disk
_UNFINISHED = b"~\n"  # ends a line that was not written whole, so that it never counts


@dataclass(frozen=True)
class Progress:
    """A step is done: told to whoever watches.

    Args:
        step: its number, from 0.
        steps: of the whole run.
        loss: mean over the batch, nats per token.
        gradient_norm: before clipping.
        learning_rate: of the update.
        is_skipped: whether the guard refused the update.
        budget: computed / visible blocks of attention; None for a mask.
        tokens_per_second: since the last line that was told.
        remaining_seconds: to go, at that speed.
        note: what else happened, such as an evaluation.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    is_skipped: bool
    budget: float | None
    tokens_per_second: float
    remaining_seconds: float
    note: str = ""


Watch = Callable[[Progress], None]


class MetricsFile:
    """A line of JSON per step, in a file that grows; a run that goes back drops what it redoes.

    A full disk does not stop a run: what cannot be written is written later.

    Args:
        path: None writes nothing, for all processes but the first.
    """

    def __init__(self, path: Path | None):
        self._path = path
        self._waiting: collections.deque[bytes] = collections.deque(maxlen=_MOST_LINES)
        self._is_torn = self._has_warned = False

    def go_back_to(self, step: int) -> None:
        """Drop the lines of this step and of all that come after it, and any unfinished one."""
        if self._path is None or not self._path.exists():
            return
        kept = [line for line in read_metrics(self._path) if line["step"] < step]
        write_whole(self._path, "".join(map(_line, kept)))

    def add(self, step: int, **values: Any) -> None:
        """One more line; a reader may see it at once."""
        if self._path is None:
            return
        self._waiting.append(_line({"step": step, **values}).encode())
        try:
            with self._path.open("ab", buffering=0) as file:
                while self._waiting:
                    self._write(file, self._waiting[0])
                    self._waiting.popleft()
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = f"metrics cannot be written for now: {error.strerror}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    def _write(self, file: IO[bytes], line: bytes) -> None:
        left = _UNFINISHED + line if self._is_torn else line
        while left:
            written = file.write(left)
            self._is_torn = written < len(left)
            left = left[written:]


class SaveAlarm:
    """Rings while saves fail: how many did since the last one that did not."""

    def __init__(self) -> None:
        self._failures, self._last = 0, -1

    def ring(self, failure: SaveFailure) -> None:
        """A save has failed; told by the thread that saves.

        Args:
            failure: what the store says about it.
        """
        self._failures, self._last = self._failures + 1, failure.step
        log_failure(failure)

    def count(self, store: CheckpointStore) -> int:
        """Saves that failed, 0 again as soon as a later step is there.

        Args:
            store: that saves.
        """
        if self._failures and max(store.steps(), default=-1) > self._last:
            self._failures = 0
        return self._failures


def _line(values: dict[str, Any]) -> str:
    """A line of JSON, which has no word for numbers that are not finite: they become null."""
    told = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    return json.dumps(told) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; one that a crash left unfinished is no line."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(
            "the metrics cannot be read", got=f"{path}: {error.strerror}"
        ) from error
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and isinstance(value.get("step"), int):
            found.append(value)
    return found
