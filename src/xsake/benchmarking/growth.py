"""Scaling fits: the exponent of time against sequence length, and crossover lengths."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from xsake.benchmarking.rows import BenchmarkRow
from xsake.errors import ArgumentError


@dataclasses.dataclass(frozen=True)
class Growth:
    """Fit `seconds = factor * tokens ** exponent` of one side, and its measured medians."""

    side: str
    exponent: float
    factor: float
    largest_residual: float  # relative to the measurement
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, tokens: float) -> float:
        """Return the seconds of the fit."""
        return self.factor * tokens**self.exponent

    def crossover(self, other: "Growth") -> float | None:
        """Return the tokens at which both fits are equal; None for equal exponents."""
        difference = self.exponent - other.exponent
        if abs(difference) < 1e-9:
            return None
        power = (math.log(other.factor) - math.log(self.factor)) / difference
        return math.exp(power) if power < 50 else None


def fit_growths(rows: Iterable[BenchmarkRow]) -> list[Growth]:
    """Fit every side that was timed at three lengths or more."""
    by_side: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.seconds is not None:
            by_side.setdefault(row.side, {})[row.shape.kv_tokens] = row.seconds.median
    return [
        fit_growth(side, *zip(*sorted(x.items()), strict=True))
        for side, x in by_side.items()
        if len(x) > 2
    ]


def fit_growth(side: str, tokens: Sequence[int], seconds: Sequence[float]) -> Growth:
    """Fit a power law by least squares of logarithms.

    Example:
        >>> growth = fit_growth("square", (1, 2, 4), (3.0, 12.0, 48.0))
        >>> round(growth.exponent, 6), round(growth.factor, 6)
        (2.0, 3.0)
    """
    if len(set(tokens)) < 2:
        raise ArgumentError("fit-lengths", "a scaling fit requires two lengths", got=tokens)
    exponent, start = np.polyfit(np.log(tokens), np.log(seconds), 1)
    predicted = np.exp(start) * np.power(np.asarray(tokens, float), exponent)
    residual = float(np.abs(predicted / np.asarray(seconds) - 1).max())
    return Growth(
        side, float(exponent), float(np.exp(start)), residual, tuple(tokens), tuple(seconds)
    )
