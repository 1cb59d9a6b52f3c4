"""What a tracker is: somebody who is told numbers, step by step, and takes them elsewhere."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Takes the metrics of a run elsewhere.

    All calls come from one thread, which is not that of the training loop. It may be slow, raise or
    hang: the run goes on without it.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """What a step, a probe or an evaluation has found.

        Args:
            step: its number; does not go down within a life of the run.
            values: by the names of `xsake.observability.metrics.flat`.
        """

    def finish(self) -> None:
        """Nothing more will come."""


MakeTracker = Callable[[], Tracker]
"""Makes a tracker, in the thread that will use it."""
