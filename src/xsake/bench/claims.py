"""Checks of measurements against limits."""

import enum
from dataclasses import dataclass

from xsake.bench.runner import Spread


class Verdict(enum.StrEnum):
    """Result of a check."""

    PASS = "pass"
    FAIL = "fail"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Claim:
    """One line of the summary: a limit and the measurement."""

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
