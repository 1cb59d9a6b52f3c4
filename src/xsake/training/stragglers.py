"""Detection of processes that are persistently slower than the others.

In synchronous training all processes have the same step time, because fast ones wait for slow
ones. So a process measures its local time (data, Python, a busy host) separately from the time it
waits for results. The shortest wait of all approximates the device time; local time plus that is
the step time without other slow processes. A slow device makes all processes wait equally and is
not detected.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from xsake.errors import ArgumentError
from xsake.training.processes import gather

INTERVAL, RATIO, ROUNDS = 50, 1.5, 3


@dataclass(frozen=True)
class StragglerReport:
    """Result of one comparison of all processes.

    Args:
        seconds: step time of each process without waiting for others.
        slow_rounds: number of consecutive slow rounds of each process, including this one.
        flagged: processes with enough consecutive slow rounds.
    """

    seconds: tuple[float, ...]
    slow_rounds: tuple[int, ...]
    flagged: tuple[int, ...] = ()

    @property
    def skew(self) -> float:
        """Step time of the slowest process relative to the median."""
        middle = _lower_median(np.array(self.seconds))
        return max(self.seconds) / middle if middle > 0 else 1.0

    def __str__(self) -> str:
        if not self.flagged:
            return f"no process is slower than the others; skew {self.skew:.2f}"
        middle = _lower_median(np.array(self.seconds))
        slow = ", ".join(
            f"process {process} takes {self.seconds[process]:.3g} s" for process in self.flagged
        )
        rounds = min(self.slow_rounds[process] for process in self.flagged)
        return f"{slow} a step, the median {middle:.3g} s, {rounds} times in a row"


def compare_processes(
    local: Float[np.ndarray, " processes"],
    waiting: Float[np.ndarray, " processes"],
    before: StragglerReport | None = None,
    *,
    ratio: float = RATIO,
    rounds: int = ROUNDS,
) -> StragglerReport:
    """Compare the processes, given the previous report.

    Args:
        local: seconds per step of local work, by process.
        waiting: seconds per step of waiting for results, by process.
        before: the previous report; None for the first round.
        ratio: slow means more than `ratio` times the median (lower median for an even count).
        rounds: number of consecutive slow rounds that flags a process.

    Example:
        >>> local, waiting = np.array([0.1, 0.1, 2.1]), np.array([3.0, 3.0, 1.0])
        >>> compare_processes(local, waiting, rounds=1).flagged
        (2,)
    """
    if not (np.isfinite(local).all() and np.isfinite(waiting).all()):
        raise ArgumentError("step times must be finite", got=f"{local=}, {waiting=}")
    seconds = local + waiting.min()
    is_slow = seconds > ratio * _lower_median(seconds)
    earlier = before.slow_rounds if before is not None else (0,) * len(seconds)
    counts = tuple(
        count + 1 if slow else 0 for count, slow in zip(earlier, is_slow.tolist(), strict=True)
    )
    flagged = tuple(process for process, count in enumerate(counts) if count >= rounds)
    return StragglerReport(tuple(seconds.tolist()), counts, flagged)


class StragglerDetector:
    """Step times of this process, compared with the others at intervals.

    Args:
        interval: steps between comparisons, in which all processes take part.
        ratio: slow means more than `ratio` times the median.
        rounds: number of consecutive slow rounds that flags a process.
    """

    def __init__(self, *, interval: int = INTERVAL, ratio: float = RATIO, rounds: int = ROUNDS):
        if interval < 1 or rounds < 1 or not ratio > 1:
            raise ArgumentError(
                "invalid settings of the straggler detector",
                got=f"{interval=}, {rounds=}, {ratio=}",
                expected="interval and rounds at least 1, ratio above 1",
            )
        self._interval, self._ratio, self._rounds = interval, ratio, rounds
        self._steps, self._local, self._waiting = 0, 0.0, 0.0
        self._last: StragglerReport | None = None

    def add(self, local_seconds: float, waiting_seconds: float) -> StragglerReport | None:
        """Add a step; return a report every `interval` steps, otherwise None.

        Args:
            local_seconds: of the step, without waiting.
            waiting_seconds: in calls that wait for results of devices.
        """
        self._steps += 1
        self._local += local_seconds
        self._waiting += waiting_seconds
        if self._steps < self._interval:
            return None
        mean_seconds = np.array([self._local, self._waiting], np.float32) / self._interval
        self._steps, self._local, self._waiting = 0, 0.0, 0.0
        local, waiting = gather(mean_seconds).astype(np.float64).T
        self._last = compare_processes(
            local, waiting, self._last, ratio=self._ratio, rounds=self._rounds
        )
        return self._last


def _lower_median(seconds: Float[np.ndarray, " processes"]) -> float:
    """Return the lower median: a mean would hide the slower one of two processes."""
    return float(np.sort(seconds)[(len(seconds) - 1) // 2])
