"""What a run tells while it goes: a line of JSON per step in a file, and progress for a screen."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xsake.bench.whole_file import write_whole
from xsake.errors import ArgumentError


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

    Args:
        path: None writes nothing, for all processes but the first.
    """

    def __init__(self, path: Path | None):
        self._path = path

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
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": step, **values}))


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
