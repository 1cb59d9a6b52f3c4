"""Goodput: share of a run's time spent on new steps, and a breakdown of the rest.

The file gets one JSON line about every second, and one at the start of every attempt. Times within
an attempt use a monotonic clock; times between attempts use the wall clock, and negative
differences count as 0.
"""

import collections
import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, ValidationError
from rich.table import Table

from xsake._io import JsonlLog
from xsake._schema import Frozen
from xsake.errors import ArgumentError

Category = Literal["init", "data", "step", "save", "restore", "recompute", "evaluation", "other"]
TimeCategory = Literal[Category, "idle"]
MEANINGS: dict[TimeCategory, str] = {
    "step": "new training steps",
    "init": "startup: devices, model, compilation",
    "data": "waiting for batches",
    "save": "checkpoints: the blocking part",
    "restore": "reading a checkpoint",
    "recompute": "steps repeated after a restart",
    "evaluation": "evaluation",
    "idle": "between attempts: from the last line of one to the first of the next",
    "other": "everything else",
}
_FLUSH_SECONDS = 1.0
_MAX_LINE_BYTES = 4096
_Count = Annotated[int, Field(ge=0)]


class _GoodputLine(Frozen, strict=True):
    """Line of the file."""

    life: Literal["begins", "goes on"]  # first line of an attempt, or a later one
    wall: float  # seconds since 1970
    seconds: dict[Category, Annotated[float, Field(ge=0)]] = {}  # since the previous line
    step: _Count | None = None  # last finished one of the attempt
    redone: _Count = 0  # steps since the previous line that an earlier attempt had finished

    def to_json(self) -> str:
        """Return the line without its end."""
        return self.model_dump_json(exclude_defaults=True)


@dataclass(frozen=True)
class Goodput:
    """Breakdown of the time of a run."""

    seconds: dict[TimeCategory, float]  # all categories
    attempts: int
    last_step: int | None  # highest finished one
    lost_steps: int  # repeated ones, with multiplicity
    unreadable: int = 0  # truncated lines

    @property
    def total_seconds(self) -> float:
        """Time of all attempts and between them."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of new steps in the total time; 0 if that is 0."""
        return self.seconds["step"] / self.total_seconds if self.total_seconds > 0 else 0.0


class GoodputRecorder(contextlib.AbstractContextManager):
    """Record the time of a run; every moment belongs to exactly one category.

    Time outside of `during` and `step` is `init` before the first step and `other` afterwards. JAX
    dispatch is asynchronous: wait for results inside the span that they belong to. A full disk
    does not stop the run: lines are written later.

    Args:
        path: append-only file; None (all processes but the primary one) disables writing.
        clock: monotonic time in seconds.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ):
        self._clock, self._wall_clock = clock, wall_clock
        self._categories: list[Category] = ["init"]
        self._last_mark = self._written = clock()
        self._spent: dict[Category, float] = collections.defaultdict(float)
        self._last_step: int | None = None
        self._step_category: Category = "step"
        self._done_before, self._redone = -1, 0
        self._log, self._has_warned = None, False
        if path is None:
            return
        self._log = JsonlLog(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists():
                steps = [line.step for line in _read_lines(path) if line and line.step is not None]
                self._done_before = max(steps, default=-1)
            self._log.append(_GoodputLine(life="begins", wall=wall_clock()).to_json(), sync=True)
        except OSError as error:
            raise ArgumentError(
                "goodput-unwritable",
                "cannot write goodput",
                got=f"{path}: {error.strerror}",
                expected="a writable file",
            ) from error

    @contextlib.contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Attribute the time of the body to a category, such as "data" or "evaluation"."""
        if category not in get_args(Category):
            raise ArgumentError(
                "goodput-category", "unknown category", got=category, expected=get_args(Category)
            )
        self._settle()
        self._categories.append(category)
        try:
            yield
        finally:
            self._settle()
            self._categories.pop()
            if self._last_mark - self._written >= _FLUSH_SECONDS:
                self.flush()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Attribute the time of the body to a training step, or to `recompute` if it is repeated.

        The step is finished when the body ends without an error.
        """
        is_redone = number <= self._done_before
        self._step_category = "recompute" if is_redone else "step"
        with self.during(self._step_category):
            self._categories[0] = "other"
            yield
            self._last_step = number
            self._redone += is_redone

    def rest_of_step(self) -> contextlib.AbstractContextManager[None]:
        """Attribute the wait for results of the last step to that step."""
        return self.during(self._step_category)

    def flush(self, *, sync: bool = False) -> None:
        """Write the time spent so far; `sync` waits for the disk."""
        self._settle()
        self._written = self._last_mark
        if self._log is None:
            return
        spent = {category: round(seconds, 6) for category, seconds in self._spent.items()}
        line = _GoodputLine(
            life="goes on", wall=self._wall_clock(), seconds=spent, step=self._last_step,
            redone=self._redone,
        )  # fmt: skip
        try:
            self._log.append(line.to_json(), sync=sync)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = f"cannot write goodput, will retry: {error.strerror}"
                warnings.warn(message, RuntimeWarning, stacklevel=3)
            return
        self._spent.clear()
        self._redone = 0

    def close(self) -> None:
        """Write the remaining time and end the attempt."""
        self.flush(sync=True)
        self._log = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        now = self._clock()
        self._spent[self._categories[-1]] += max(0.0, now - self._last_mark)
        self._last_mark = now


def read_goodput(path: Path) -> Goodput:
    """Read the file of a `GoodputRecorder`."""
    seconds: dict[TimeCategory, float] = dict.fromkeys(MEANINGS, 0.0)
    attempts = lost_steps = unreadable = 0
    last_step = wall = None
    try:
        for line in _read_lines(path):
            if line is None:
                unreadable += 1
                continue
            if line.life == "begins":
                attempts += 1
                seconds["idle"] += max(0.0, line.wall - wall) if wall is not None else 0.0
            wall = line.wall
            lost_steps += line.redone
            if line.step is not None:
                last_step = max(line.step, last_step or 0)
            for category, spent in line.seconds.items():
                seconds[category] += spent
    except OSError as error:
        raise ArgumentError(
            "goodput-unreadable",
            "cannot read goodput",
            got=f"{path}: {error.strerror}",
            expected="a goodput file",
        ) from error
    if not attempts:
        raise ArgumentError(
            "goodput-empty", "the file has no attempt", got=path, expected="a goodput file"
        )
    return Goodput(seconds, attempts, last_step, lost_steps, unreadable)


def goodput_table(goodput: Goodput) -> Table:
    """Render goodput as a table of categories."""
    steps = "no step" if goodput.last_step is None else f"step {goodput.last_step}"
    counts = f"attempts: {goodput.attempts}, lost steps: {goodput.lost_steps}"
    title = f"Goodput {goodput.share:.1%}: {steps}, {counts}"
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in ("time", "seconds", "share", "description"):
        table.add_column(name, justify="right" if name in ("seconds", "share") else "left")
    for category, meaning in MEANINGS.items():
        seconds = goodput.seconds[category]
        share = seconds / goodput.total_seconds if goodput.total_seconds > 0 else 0.0
        style = "bold" if category == "step" else "dim" if not seconds else None
        table.add_row(category, f"{seconds:,.1f}", f"{share:.1%}", meaning, style=style)
    if goodput.unreadable:
        table.caption = f"truncated lines: {goodput.unreadable}"
    return table


def _read_lines(path: Path) -> Iterator[_GoodputLine | None]:
    """Yield the lines of a file; None for invalid ones."""
    with path.open("rb") as file:
        while text := file.readline(_MAX_LINE_BYTES):
            try:
                yield _GoodputLine.model_validate_json(text) if text.endswith(b"\n") else None
            except ValidationError:
                yield None
