"""How cost grows with length: an exponent fitted to what was measured, and where lines cross."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from xsake.bench.rows import BenchmarkRow
from xsake.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Growth:
    """`seconds = factor * tokens ** exponent`, fitted to one side.

    Attributes:
        side: whose.
        exponent, factor: of the fit.
        largest_residual: of the fit, as a share of what was measured.
        tokens, seconds: what was measured, medians.
    """

    side: str
    exponent: float
    factor: float
    largest_residual: float
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        """Seconds by the fit."""
        return self.factor * tokens**self.exponent

    def meets(self, other: "Growth") -> float | None:
        """Tokens at which both fits are equal; None for fits that grow alike."""
        difference = self.exponent - other.exponent
        if abs(difference) < 1e-9:
            return None
        power = (math.log(other.factor) - math.log(self.factor)) / difference
        return math.exp(power) if power < 50 else None


def growths(rows: Iterable[BenchmarkRow]) -> list[Growth]:
    """A fit for every side that was timed at three lengths or more.

    Args:
        rows: of one experiment.
    """
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.seconds is not None:
            found.setdefault(row.side, {})[row.shape.kv_tokens] = row.seconds.median
    return [
        fitted(side, *zip(*sorted(x.items()), strict=True))
        for side, x in found.items()
        if len(x) > 2
    ]


def fitted(side: str, tokens: Sequence[int], seconds: Sequence[float]) -> Growth:
    """Least squares between logarithms.

    Example:
        >>> growth = fitted("square", (1, 2, 4), (3.0, 12.0, 48.0))
        >>> round(growth.exponent, 6), round(growth.factor, 6)
        (2.0, 3.0)
    """
    if len(set(tokens)) < 2:
        raise ArgumentError("One length shows no growth.", got=tokens, expected="two or more")
    exponent, start = np.polyfit(np.log(tokens), np.log(seconds), 1)
    foretold = np.exp(start) * np.power(np.asarray(tokens, float), exponent)
    residual = float(np.abs(foretold / np.asarray(seconds) - 1).max())
    return Growth(
        side, float(exponent), float(np.exp(start)), residual, tuple(tokens), tuple(seconds)
    )
