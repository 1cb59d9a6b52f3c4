"""Finds processes that are slower than the others again and again, from the times of their steps.

In synchronous training the whole step takes equally long everywhere, because the fast wait for
the slow. So a process counts its own time (data, Python, a busy machine) apart from the time it
waits for results. The shortest wait of all is about what the devices need; a process's own time
on top of that is what a step would take if nobody else were slow. A device that computes slowly
makes all processes wait alike, and is not seen here.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from xsake.errors import ArgumentError
from xsake.training.processes import gather

EVERY, RATIO, ROUNDS = 50, 1.5, 3


@dataclass(frozen=True)
class Round:
    """What one comparison of all processes says.

    Args:
        seconds: that a step takes, or would take, with each process alone.
        slow_rounds: how many rounds in a row each process has been slow, this one included.
        flagged: processes that were slow often enough in a row.
    """

    seconds: tuple[float, ...]
    slow_rounds: tuple[int, ...]
    flagged: tuple[int, ...] = ()

    @property
    def skew(self) -> float:
        """The slowest process's time, in times of the median process."""
        middle = _median(np.array(self.seconds))
        return max(self.seconds) / middle if middle > 0 else 1.0

    def __str__(self) -> str:
        if not self.flagged:
            return f"no process is slower than the others; skew {self.skew:.2f}"
        middle = _median(np.array(self.seconds))
        slow = ", ".join(
            f"process {process} takes {self.seconds[process]:.3g} s" for process in self.flagged
        )
        rounds = min(self.slow_rounds[process] for process in self.flagged)
        return f"{slow} a step, the median {middle:.3g} s, {rounds} times in a row"


def judge(
    own: Float[np.ndarray, " processes"],
    waiting: Float[np.ndarray, " processes"],
    before: Round | None = None,
    *,
    ratio: float = RATIO,
    rounds: int = ROUNDS,
) -> Round:
    """Compare the processes, given what the round before said.

    Args:
        own: seconds per step that each process spent by itself.
        waiting: seconds per step that it waited for results.
        before: the last round; None for the first.
        ratio: slow means longer than so many medians; of two processes, the faster is the median.
        rounds: so many slow rounds in a row and a process is flagged.

    Example:
        >>> judge(np.array([0.1, 0.1, 2.1]), np.array([3.0, 3.0, 1.0]), rounds=1).flagged
        (2,)
    """
    if not (np.isfinite(own).all() and np.isfinite(waiting).all()):
        raise ArgumentError("times of steps must be numbers", got=f"{own=}, {waiting=}")
    seconds = own + waiting.min()
    is_slow = seconds > ratio * _median(seconds)
    earlier = before.slow_rounds if before is not None else (0,) * len(seconds)
    counts = tuple(
        count + 1 if slow else 0 for count, slow in zip(earlier, is_slow.tolist(), strict=True)
    )
    flagged = tuple(process for process, count in enumerate(counts) if count >= rounds)
    return Round(tuple(seconds.tolist()), counts, flagged)


class StragglerWatch:
    """Collects the times of this process's steps and compares them with the others' regularly.

    Args:
        every: steps between two comparisons, in which all processes take part.
        ratio: slow means longer than so many medians.
        rounds: so many slow rounds in a row and a process is flagged.
    """

    def __init__(self, *, every: int = EVERY, ratio: float = RATIO, rounds: int = ROUNDS):
        if every < 1 or rounds < 1 or not ratio > 1:
            raise ArgumentError(
                "stragglers cannot be found so",
                got=f"{every=}, {rounds=}, {ratio=}",
                expected="every and rounds from 1, and a ratio above 1",
            )
        self._every, self._ratio, self._rounds = every, ratio, rounds
        self._steps, self._own, self._waiting = 0, 0.0, 0.0
        self._last: Round | None = None

    def add(self, own_seconds: float, waiting_seconds: float) -> Round | None:
        """Count a step; every so many steps, what all processes say together.

        Args:
            own_seconds: of the step, less what follows.
            waiting_seconds: inside calls that wait for results of devices.
        """
        self._steps += 1
        self._own += own_seconds
        self._waiting += waiting_seconds
        if self._steps < self._every:
            return None
        mine = np.array([self._own, self._waiting], np.float32) / self._every
        self._steps, self._own, self._waiting = 0, 0.0, 0.0
        own, waiting = gather(mine).astype(np.float64).T
        self._last = judge(own, waiting, self._last, ratio=self._ratio, rounds=self._rounds)
        return self._last


def _median(seconds: Float[np.ndarray, " processes"]) -> float:
    """The lower one of two middles: a mean would hide the slower one of two processes."""
    return float(np.sort(seconds)[(len(seconds) - 1) // 2])
