"""Which column of the index a number of a metrics line belongs to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from xsake.observability.metrics import METRICS, MOST_SERIES

Row = tuple[Int[np.ndarray, " S"], Float[np.ndarray, " S"]]
"""Columns, and the numbers that stand there; NaN where there is none."""


class Columns:
    """Names of series in the order in which they were first seen.

    Args:
        names: those that are known already.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.names = list(names)
        self._places = {name: place for place, name in enumerate(names)}
        self._known: dict[tuple[Any, ...], Int[np.ndarray, " S"]] = {}

    def place(self, name: str) -> int | None:
        """The column of a series; None if nobody has told it yet."""
        return self._places.get(name)

    def row(self, line: dict[str, Any]) -> Row:
        """The numbers of a line with their columns; lines of one kind cost no names.

        Args:
            line: of a step.
        """
        kinds: list[Any] = []
        numbers: list[Any] = []
        for name, value in line.items():
            metric = METRICS.get(name)
            if metric is None:
                continue
            if not metric.axes:
                if isinstance(value, int | float):
                    kinds.append(name)
                    numbers.append(value)
            elif _is_matrix(value):
                kinds.append((name, len(value), len(value[0])))
                for part in value:
                    numbers.extend(part)
        key = tuple(kinds)
        if len(numbers) > MOST_SERIES:
            return np.zeros(0, np.int64), np.zeros(0)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = np.array([self._column(name) for name in _names(key)], int)
        try:
            values = np.array(numbers, np.float64)
        except (TypeError, ValueError, OverflowError):
            values = np.full(len(numbers), np.nan)
        values[np.abs(values) > np.finfo(np.float32).max] = np.nan
        return found, values

    def _column(self, name: str) -> int:
        if name not in self._places:
            self._places[name] = len(self.names)
            self.names.append(name)
        return self._places[name]


def _is_matrix(value: Any) -> bool:
    if not isinstance(value, list) or not value or not isinstance(value[0], list):
        return False
    width = len(value[0])
    return bool(width) and all(isinstance(part, list) and len(part) == width for part in value)


def _names(key: tuple[Any, ...]) -> list[str]:
    found: list[str] = []
    for kind in key:
        if isinstance(kind, str):
            found.append(kind)
        else:
            name, layers, heads = kind
            found += [f"{name}/{layer}/{head}" for layer in range(layers) for head in range(heads)]
    return found
