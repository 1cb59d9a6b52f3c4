"""Interleaved timing of several sides, its statistics, and checks against limits."""

import enum
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from xsake.errors import ArgumentError

CLEAR_SPREAD = 0.25
"""Maximum interquartile range / median of a ratio that is reported as a number."""

QUICK_SECONDS = 1.0


@dataclass(frozen=True)
class TimedSide:
    """One side: `run()` computes once, waits for the result and returns the seconds."""

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
        """Compute median and quartiles with linear interpolation."""
        if len(sample) == 0:
            raise ArgumentError("empty-sample", "empty sample", fix="run at least one round")
        q25, median, q75 = np.percentile(np.asarray(sample, float), [25, 50, 75])
        return cls(float(median), float(q25), float(q75))

    @property
    def relative(self) -> float:
        """Interquartile range / median."""
        return (self.q75 - self.q25) / self.median

    @property
    def is_clear(self) -> bool:
        """Whether the spread is small enough to report the median."""
        return self.relative <= CLEAR_SPREAD

    def describe(self, unit: str = "x") -> str:
        """Format as `1.23x [1.20, 1.27]`, or as unclear if the spread is too large."""
        if not self.is_clear:
            return f"unclear: spread {self.relative:.0%} [{self.q25:.3g}, {self.q75:.3g}]"
        return f"{self.median:.3f}{unit} [{self.q25:.3f}, {self.q75:.3f}]"


def time_call(call: Callable[[], object]) -> float:
    """Time one call, which must wait for its result (`jax.block_until_ready`).

    Example:
        >>> time_call(lambda: sum(range(10))) > 0
        True
    """
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def time_warm(call: Callable[[], object]) -> float:
    """Time a call with warm caches: calls below a second run twice, and the second counts.

    After a side that used gigabytes, cold caches and page faults would dominate a call of
    milliseconds; they do not matter for calls of seconds.

    Example:
        >>> calls = []
        >>> seconds = time_warm(lambda: calls.append(1))
        >>> len(calls)
        2
    """
    first = time_call(call)
    return time_call(call) if first < QUICK_SECONDS else first


def interleave(
    sides: Sequence[TimedSide],
    *,
    rounds: int,
    warmup: int = 2,
    settle_seconds: float = 0.02,
) -> dict[str, list[float]]:
    """Time all sides in turn, `rounds` times.

    Even rounds run the sides in order, odd rounds in reverse (A B, B A, A B, ...), which cancels
    effects of one side on the next: heat, caches, spinning threads.

    Args:
        sides: with distinct names.
        rounds: timed rounds; one number per side each.
        warmup: untimed rounds before them.
        settle_seconds: pause before each side, until the threads of the last one sleep.

    Returns:
        Seconds by side and round.

    Example:
        >>> times = interleave([TimedSide("a", lambda: 1.0), TimedSide("b", lambda: 2.0)], rounds=3)
        >>> times["b"]
        [2.0, 2.0, 2.0]
    """
    names = [side.name for side in sides]
    if len(set(names)) != len(names) or not names:
        raise ArgumentError(
            "side-names", "sides must have distinct names", got=names, expected="one per side"
        )
    if rounds < 1:
        raise ArgumentError("rounds", "no rounds to time", got=rounds, expected="rounds >= 1")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()  # a collection would count for the side that triggers it
    try:
        for round_index in range(-warmup, rounds):
            for side in sides if round_index % 2 == 0 else sides[::-1]:
                time.sleep(settle_seconds)
                elapsed = side.run()
                if round_index >= 0:
                    seconds[side.name].append(elapsed)
    finally:
        if collecting:
            gc.enable()
    return seconds


def pair_ratio(seconds: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Return the spread of `seconds[i] / baseline[i]` over the rounds of one interleaved run.

    Example:
        >>> pair_ratio([1.0, 3.0], [2.0, 6.0]).median
        0.5
    """
    if len(seconds) != len(baseline):
        got, expected = f"{len(seconds)} and {len(baseline)}", "two sides of one interleaved run"
        raise ArgumentError("round-counts", "numbers of rounds differ", got=got, expected=expected)
    return Spread.of([one / other for one, other in zip(seconds, baseline, strict=True)])


class Verdict(enum.StrEnum):
    """Result of a check."""

    PASS = "pass"
    FAIL = "fail"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Claim:
    """One line of a summary: a limit and the measurement."""

    topic: str
    limit: str
    measured: str
    verdict: Verdict


def check_limit(measured: Spread, limit: float) -> Verdict:
    """Check whether `measured` is at or below `limit`.

    PASS if three quarters of the rounds are, FAIL if three quarters are not, UNCLEAR if the limit
    is between the quartiles or the spread is too large.

    Example:
        >>> check_limit(Spread(median=0.9, q25=0.88, q75=0.92), 1.0).value
        'pass'
    """
    if not measured.is_clear:
        return Verdict.UNCLEAR
    if measured.q75 <= limit:
        return Verdict.PASS
    return Verdict.FAIL if measured.q25 > limit else Verdict.UNCLEAR
