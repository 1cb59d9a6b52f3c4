"""Goodput: which share of a run's time went into steps that lasted, and where the rest went.

A file grows by a line of JSON about every second while the run lives, and by one more whenever it
is started again. Times within a life come from a clock that never jumps; between lives there is
only the wall clock, whose jumps backward count as no time at all.
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

Spent = Literal["init", "data", "step", "save", "restore", "recompute", "evaluation", "other"]
Kind = Literal[Spent, "idle"]
MEANINGS: dict[Kind, str] = {
    "step": "new steps of training",
    "init": "start of a life: devices, model, compilation",
    "data": "waiting for batches",
    "save": "checkpoints: the part that training waits for",
    "restore": "reading a checkpoint",
    "recompute": "steps that an earlier life had done and lost",
    "evaluation": "evaluation",
    "idle": "between lives: from the last line of one to the first of the next",
    "other": "everything else",
}
_FLUSH_SECONDS = 1.0
_MOST_LINE_BYTES = 4096
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]


class _Line(Frozen, strict=True):
    """One line of the file.

    Attributes:
        life: first line of a life, or a later one.
        wall: seconds since 1970, by the wall clock.
        seconds: spent since the line before, by kind.
        step: the last step that was done in this life.
        redone: steps since the line before that an earlier life had done already.
    """

    life: Literal["begins", "goes on"]
    wall: Annotated[float, Field(allow_inf_nan=False)]
    seconds: dict[Spent, _Seconds] = {}
    step: _Count | None = None
    redone: _Count = 0


@dataclass(frozen=True)
class Goodput:
    """Where the time of a run went, from its first life to the last line of its last.

    Args:
        seconds: by kind; all kinds are there.
        lives: how often the run was started.
        last_step: the highest step that was done; None if there was none.
        lost_steps: steps that had to be done again, counted as often as they were.
        unreadable: lines that a crash left unfinished.
    """

    seconds: dict[Kind, float]
    lives: int
    last_step: int | None
    lost_steps: int
    unreadable: int = 0

    @property
    def total_seconds(self) -> float:
        """Of all lives and the time between them."""
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Of new steps in all the time; 0 for a run that took none."""
        return self.seconds["step"] / self.total_seconds if self.total_seconds > 0 else 0.0


class Recorder:
    """Writes down where the time goes; it is always in exactly one kind, so that nothing is lost.

    What happens outside of `during` and `step` is `init` before the first step and `other`
    afterwards. Devices work while Python goes on: wait for results inside the span that they
    belong to. A full disk does not stop a run: what cannot be written is written later.

    Args:
        path: the file, which only grows; None writes nothing, for all processes but the first.
        clock: seconds that never jump.
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
        self._kinds: list[Spent] = ["init"]
        self._mark = self._written = clock()
        self._spent: dict[Spent, float] = collections.defaultdict(float)
        self._last_step: int | None = None
        self._step_kind: Spent = "step"
        self._done_before, self._redone = -1, 0
        self._log: JsonlLog | None = None
        self._has_warned = False
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log = JsonlLog(path)
            if path.exists():
                steps = [line.step for line in _lines(path) if line and line.step is not None]
                self._done_before = max(steps, default=-1)
            self._append(_Line(life="begins", wall=wall_clock()), sync=True)
        except OSError as error:
            raise ArgumentError(
                "goodput cannot be written",
                got=f"{path}: {error.strerror}",
                expected="a file that can be added to",
            ) from error

    @contextlib.contextmanager
    def during(self, kind: Spent) -> Iterator[None]:
        """The time of the body is of this kind; what it interrupts does not count on meanwhile.

        Args:
            kind: such as "data", "save" or "evaluation".
        """
        if kind not in get_args(Spent):
            raise ArgumentError("there is no such kind of time", got=kind, expected=get_args(Spent))
        self._settle()
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._settle()
            self._kinds.pop()
            if self._mark - self._written >= _FLUSH_SECONDS:
                self.flush()

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """The body is a step of training; one that an earlier life had done is recomputed.

        Args:
            number: of the step; it counts as done when the body ends without an error.
        """
        is_redone = number <= self._done_before
        self._step_kind = "recompute" if is_redone else "step"
        with self.during(self._step_kind):
            self._kinds[0] = "other"
            yield
            self._last_step = number
            self._redone += is_redone

    @contextlib.contextmanager
    def rest_of_step(self) -> Iterator[None]:
        """The body waits for results of the last step, which belong to its time."""
        with self.during(self._step_kind):
            yield

    def flush(self) -> None:
        """Write down what has been spent so far."""
        self._flush(sync=False)

    def _flush(self, *, sync: bool) -> None:
        self._settle()
        self._written = self._mark
        if self._log is None:
            return
        line = _Line(
            life="goes on",
            wall=self._wall_clock(),
            seconds={kind: round(seconds, 6) for kind, seconds in self._spent.items()},
            step=self._last_step,
            redone=self._redone,
        )
        try:
            self._append(line, sync=sync)
        except OSError as error:
            self._warn(error)
            return
        self._spent.clear()
        self._redone = 0

    def close(self) -> None:
        """Write down the rest; the life is over."""
        self._flush(sync=True)
        self._log = None

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, line: _Line, *, sync: bool) -> None:
        assert self._log is not None
        self._log.append(line.model_dump_json(exclude_defaults=True), sync=sync)

    def _settle(self) -> None:
        now = self._clock()
        self._spent[self._kinds[-1]] += max(0.0, now - self._mark)
        self._mark = now

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            message = f"goodput cannot be written for now: {error.strerror}"
            warnings.warn(message, RuntimeWarning, stacklevel=3)


def report(path: Path) -> Goodput:
    """What the file of a run says.

    Args:
        path: as a recorder wrote it.
    """
    seconds: dict[Kind, float] = dict.fromkeys(MEANINGS, 0.0)
    lives = lost = unreadable = 0
    last_step: int | None = None
    wall: float | None = None
    try:
        for line in _lines(path):
            if line is None:
                unreadable += 1
                continue
            if line.life == "begins":
                lives += 1
                seconds["idle"] += max(0.0, line.wall - wall) if wall is not None else 0.0
            wall = line.wall
            lost += line.redone
            if line.step is not None:
                last_step = max(line.step, last_step or 0)
            for kind, spent in line.seconds.items():
                seconds[kind] += spent
    except OSError as error:
        raise ArgumentError(
            "goodput cannot be read", got=f"{path}: {error.strerror}", expected="a recorder's file"
        ) from error
    if not lives:
        raise ArgumentError("the file tells of no life", got=path, expected="a recorder's file")
    return Goodput(seconds, lives, last_step, lost, unreadable)


def table(found: Goodput) -> Table:
    """Goodput for the screen: the share of every kind of time, the good one first.

    Args:
        found: by `report`.
    """
    steps = "no step" if found.last_step is None else f"step {found.last_step}"
    title = (
        f"Goodput {found.share:.1%}: {steps}, lives: {found.lives}, lost steps: {found.lost_steps}"
    )
    drawn = Table(title=title, title_justify="left", caption_justify="left")
    for name in ("time", "seconds", "share"):
        drawn.add_column(name, justify="left" if name == "time" else "right")
    drawn.add_column("what it is")
    for kind, meaning in MEANINGS.items():
        seconds = found.seconds[kind]
        share = seconds / found.total_seconds if found.total_seconds > 0 else 0.0
        style = "bold" if kind == "step" else "dim" if not seconds else None
        drawn.add_row(kind, f"{seconds:,.1f}", f"{share:.1%}", meaning, style=style)
    if found.unreadable:
        drawn.caption = f"lines that a crash left unfinished: {found.unreadable}"
    return drawn


def _lines(path: Path) -> Iterator[_Line | None]:
    """The lines of a file; None for one that cannot be read."""
    with path.open("rb") as file:
        while text := file.readline(_MOST_LINE_BYTES):
            try:
                yield _Line.model_validate_json(text) if text.endswith(b"\n") else None
            except ValidationError:
                yield None
