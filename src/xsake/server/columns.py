"""Which column of the index a number of a metrics line belongs to."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from xsake.observability.metrics import METRICS, MOST_SERIES

Row = tuple[Int[np.ndarray, " S"], Float[np.ndarray, " S"]]
"""Columns, and the numbers that stand there; NaN where there is none."""
_MAX_KINDS = 256  # of lines whose columns are remembered


class Columns:
    """Names of series in the order in which they were first seen, at most `MOST_SERIES`.

    Args:
        names: those that are known already.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.names = list(names)
        self._places = {name: place for place, name in enumerate(names)}
        self._known: dict[tuple[Any, ...], Int[np.ndarray, " S"]] = {}

    def place(self, name: str) -> int | None:
        """The column of a series; None if no line has had it yet."""
        return self._places.get(name)

    def row(self, line: dict[str, Any]) -> Row:
        """Return the numbers of a line with their columns; lines of one kind cost no names.

        Series beyond `MOST_SERIES` have no column and are left out.

        Args:
            line: of a step, validated.
        """
        kinds: list[Any] = []
        single: list[Any] = []
        matrices: list[np.ndarray] = []
        for name, value in line.items():
            metric = METRICS.get(name)
            if metric is None:
                continue
            if metric.axes:
                matrices.append(value.ravel())
                kinds.append((name, *value.shape))
            else:
                single.append(value)
                kinds.insert(len(single) - 1, name)
        key = tuple(kinds)
        columns = self._known.get(key)
        if columns is None:
            if len(self._known) >= _MAX_KINDS:
                self._known.clear()
            columns = self._known[key] = np.array([self._column(name) for name in _names(key)], int)
        values = np.array(single, np.float64)
        if matrices:
            values = np.concatenate([values, *matrices])
        if len(self.names) < MOST_SERIES:
            return columns, values
        has_column = columns >= 0
        return columns[has_column], values[has_column]

    def _column(self, name: str) -> int:
        if name not in self._places:
            if len(self.names) >= MOST_SERIES:
                return -1
            self._places[name] = len(self.names)
            self.names.append(name)
        return self._places[name]


def _names(key: tuple[Any, ...]) -> list[str]:
    found: list[str] = []
    for kind in key:
        if isinstance(kind, str):
            found.append(kind)
        else:
            name, layers, heads = kind
            found += [f"{name}/{layer}/{head}" for layer in range(layers) for head in range(heads)]
    return found
