"""A limit beside what was measured, and the verdict; the measuring is done elsewhere."""

import enum
from dataclasses import dataclass

from xsake.bench.runner import Spread


class Verdict(enum.StrEnum):
    """What a measurement says about a limit."""

    PASS = "pass"
    FAIL = "fail"
    UNCLEAR = "unclear"


@dataclass(frozen=True)
class Claim:
    """One line of the summary: what was promised and what came out."""

    topic: str
    promise: str
    measured: str
    verdict: Verdict


def judge(measured: Spread, limit: float) -> Verdict:
    """Whether `measured` stays at or below `limit`.

    PASS when three quarters of the rounds do, FAIL when three quarters do not, UNCLEAR when the
    limit lies inside the quartiles or the spread hides the median.

    Example:
        >>> judge(Spread(median=0.9, q25=0.88, q75=0.92), 1.0).value
        'pass'
    """
    if not measured.is_clear:
        return Verdict.UNCLEAR
    if measured.q75 <= limit:
        return Verdict.PASS
    return Verdict.FAIL if measured.q25 > limit else Verdict.UNCLEAR
