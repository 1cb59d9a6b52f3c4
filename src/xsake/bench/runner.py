"""Interleaved timing of several sides and the statistics of it; knows nothing about attention."""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xsake.errors import ArgumentError

CLEAR_SPREAD = 0.25
"""A ratio whose interquartile range exceeds this share of its median is not shown as a number."""

QUICK_SECONDS = 1.0


@dataclass(frozen=True)
class Side:
    """One contender: `run()` does the work once, waits for it, and returns the seconds it took."""

    name: str
    run: Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a sample."""

    median: float
    q25: float
    q75: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> "Spread":
        """Median and quartiles of `sample` (linear interpolation between order statistics)."""
        if len(sample) == 0:
            raise ArgumentError("An empty sample has no median.", fix="Run at least one round.")
        q25, median, q75 = np.percentile(np.asarray(sample, float), [25, 50, 75])
        return cls(float(median), float(q25), float(q75))

    @property
    def relative(self) -> float:
        """Interquartile range as a share of the median."""
        return (self.q75 - self.q25) / self.median

    @property
    def is_clear(self) -> bool:
        """Whether the spread is small enough for the median to be quoted."""
        return self.relative <= CLEAR_SPREAD

    def describe(self, unit: str = "x") -> str:
        """`1.23x [1.20, 1.27]`, or a refusal when the spread hides the number."""
        if not self.is_clear:
            return f"unclear: spread {self.relative:.0%} [{self.q25:.3g}, {self.q75:.3g}]"
        return f"{self.median:.3f}{unit} [{self.q25:.3f}, {self.q75:.3f}]"


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call; the call itself must wait for its result (`jax.block_until_ready`).

    Example:
        >>> time_call(lambda: sum(range(10))) > 0
        True
    """
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_warm(call: Callable[[], object]) -> float:
    """Seconds of a call that other sides ran before; a quick one is made twice, the second counts.

    Whoever comes after a side that took gigabytes finds cold caches and pages that are no longer
    there, which would be most of a call of milliseconds and nothing of one that takes seconds.

    Example:
        >>> calls = []
        >>> seconds = time_warm(lambda: calls.append(1))
        >>> len(calls)
        2
    """
    first = time_call(call)
    return time_call(call) if first < QUICK_SECONDS else first


def interleave(
    sides: Sequence[Side],
    *,
    rounds: int,
    warmup: int = 2,
    settle_seconds: float = 0.02,
) -> dict[str, list[float]]:
    """Time all sides in turn, `rounds` times, so that every round sees the same machine.

    Round i visits the sides in order when i is even and in reverse when it is odd (A B, B A, A B,
    ...), which cancels what one side leaves behind for the next: heat, caches, spinning threads.

    Args:
        sides: contenders with distinct names.
        rounds: timed rounds; each gives one number per side.
        warmup: untimed rounds before them.
        settle_seconds: pause before each turn, so that the threads of the last side go to sleep.

    Returns:
        Seconds by side name, in round order: entry i of two sides belongs to the same round.

    Example:
        >>> times = interleave([Side("a", lambda: 1.0), Side("b", lambda: 2.0)], rounds=3)
        >>> times["b"]
        [2.0, 2.0, 2.0]
    """
    names = [side.name for side in sides]
    if len(set(names)) != len(names) or not names:
        raise ArgumentError("Sides need distinct names.", got=names, expected="one name per side")
    if rounds < 1:
        raise ArgumentError("There must be something to time.", got=rounds, expected="rounds >= 1")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()  # a collection inside one turn would be charged to that side
    try:
        for round_index in range(-warmup, rounds):
            for side in sides if round_index % 2 == 0 else list(reversed(sides)):
                time.sleep(settle_seconds)
                taken = side.run()
                if round_index >= 0:
                    seconds[side.name].append(taken)
    finally:
        if collecting:
            gc.enable()
    return seconds


def pair_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Spread of `seconds[i] / baseline[i]` over the rounds of one interleaved run.

    Example:
        >>> pair_ratio([1.0, 3.0], [2.0, 6.0]).median
        0.5
    """
    if len(seconds) != len(baseline):
        raise ArgumentError(
            "Ratios are taken round by round.",
            got=f"{len(seconds)} and {len(baseline)} rounds",
            expected="two sides of one interleaved run",
        )
    return Spread.of([one / other for one, other in zip(seconds, baseline, strict=True)])
