"""`jax.profiler` traces of selected steps."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from xsake.errors import ArgumentError

MAX_STEPS = 1000  # traces take megabytes per step
FOLDER = "profile"


@dataclass(frozen=True)
class StepRange:
    """Steps `first` to `last - 1`."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "StepRange":
        """Parse a range of steps.

        Example:
            >>> StepRange.parse("steps=10:15")
            StepRange(first=10, last=15)
        """
        match = re.fullmatch(r"(?:steps=)?([0-9]{1,15}):([0-9]{1,15})", text)
        first, last = map(int, match.groups()) if match else (0, 0)
        if not first < last <= first + MAX_STEPS:
            expected = f"such as steps=10:15, at most {MAX_STEPS} steps"
            raise ArgumentError(
                "profile-steps", "invalid range of steps", got=repr(text), expected=expected
            )
        return cls(first, last)


class Profiler:
    """Trace a range of steps of this process into the run's folder; None disables it."""

    def __init__(self, folder: Path, steps: StepRange | None):
        self._folder, self._steps, self._is_tracing = folder / FOLDER, steps, False

    def before(self, step: int) -> None:
        """Start the trace before its first step."""
        steps = self._steps
        if steps is not None and not self._is_tracing and steps.first <= step < steps.last:
            jax.profiler.start_trace(str(self._folder))
            self._is_tracing = True

    def after(self, step: int, results: Any) -> None:
        """Stop the trace after its last step, once the outputs of that step are ready."""
        if self._is_tracing and self._steps is not None and step + 1 >= self._steps.last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Stop an active trace."""
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


def find_traces(folder: Path) -> list[Path]:
    """Return the trace folders in a run's folder, oldest first."""
    return sorted(path for path in (folder / FOLDER).glob("plugins/profile/*") if path.is_dir())
