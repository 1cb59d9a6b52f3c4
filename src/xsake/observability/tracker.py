"""Protocol of experiment trackers."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Experiment tracker.

    All calls come from one thread, which is not the training thread. Slow, failing or hanging
    trackers do not stop the run.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step, a probe or an evaluation.

        Args:
            step: number of the step; does not decrease within an attempt.
            values: by the names of `xsake.observability.metrics.flatten_metricsten_metrics`.
        """

    def finish(self) -> None:
        """Flush and close."""


TrackerFactory = Callable[[], Tracker]
"""Creates a tracker; called in the thread that uses it."""
