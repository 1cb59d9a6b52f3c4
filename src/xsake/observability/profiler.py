"""Profiles: `jax.profiler` traces of a few steps of a run, and how to look at them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from xsake.errors import ArgumentError

MOST_STEPS = 1000  # traces grow by megabytes a step
FOLDER = "profile"


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last - 1`.

    Args:
        first: number of the first one that is traced.
        last: of the first one that is not.
    """

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "StepRange":
        """From what people write.

        Example:
            >>> StepRange.parse("steps=10:15")
            StepRange(first=10, last=15)
        """
        found = re.fullmatch(r"(?:steps=)?([0-9]{1,15}):([0-9]{1,15})", text)
        if found is None:
            raise ArgumentError(
                "this does not say which steps", got=repr(text), expected="such as steps=10:15"
            )
        first, last = map(int, found.groups())
        if not first < last <= first + MOST_STEPS:
            raise ArgumentError(
                "so many steps cannot be traced",
                got=repr(text),
                expected=f"the first before the last, and at most {MOST_STEPS} of them",
            )
        return cls(first, last)


class Profiler:
    """Traces some steps of this process into a folder.

    Args:
        folder: of the run.
        steps: which; None: nothing is traced.
    """

    def __init__(self, folder: Path, steps: StepRange | None):
        self._folder, self._steps, self._is_on = folder / FOLDER, steps, False

    def before(self, step: int) -> None:
        """A step begins."""
        steps = self._steps
        if steps is not None and not self._is_on and steps.first <= step < steps.last:
            jax.profiler.start_trace(str(self._folder))
            self._is_on = True

    def after(self, step: int, results: Any) -> None:
        """A step has been started; the last one that is traced is waited for.

        Args:
            step: its number.
            results: what it computes.
        """
        if self._is_on and self._steps is not None and step + 1 >= self._steps.last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """End a trace that is still being made."""
        if self._is_on:
            self._is_on = False
            jax.profiler.stop_trace()


def traces(folder: Path) -> list[Path]:
    """The traces of a run, oldest first: a folder each.

    Args:
        folder: of the run.
    """
    return sorted(path for path in (folder / FOLDER).glob("plugins/profile/*") if path.is_dir())
