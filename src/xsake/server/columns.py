"""Map the values of a metrics line to columns of the index."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from xsake.observability.metrics import MAX_SERIES, METRICS

ColumnValues = tuple[Int[np.ndarray, " S"], Float[np.ndarray, " S"]]
"""Columns and their values; NaN for missing values."""
_MAX_SIGNATURES = 256  # cached line signatures


class Columns:
    """Series names in order of first appearance, at most `MAX_SERIES`.

    Args:
        names: initial names.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.names = list(names)
        self._indices = {name: index for index, name in enumerate(names)}
        self._cache: dict[tuple[Any, ...], Int[np.ndarray, " S"]] = {}

    def find(self, name: str) -> int | None:
        """Return the column of a series; None if it has not appeared yet."""
        return self._indices.get(name)

    def row(self, line: dict[str, Any]) -> ColumnValues:
        """Return the values of a line with their columns; columns are cached by line signature.

        Series beyond `MAX_SERIES` have no column and are dropped.

        Args:
            line: validated line of a step.
        """
        signature: list[Any] = []
        single: list[Any] = []
        matrices: list[np.ndarray] = []
        for name, value in line.items():
            metric = METRICS.get(name)
            if metric is None:
                continue
            if metric.axes:
                matrices.append(value.ravel())
                signature.append((name, *value.shape))
            else:
                single.append(value)
                signature.insert(len(single) - 1, name)
        key = tuple(signature)
        columns = self._cache.get(key)
        if columns is None:
            if len(self._cache) >= _MAX_SIGNATURES:
                self._cache.clear()
            indices = [self._get_or_add(name) for name in _series_names(key)]
            columns = self._cache[key] = np.array(indices, int)
        values = np.array(single, np.float64)
        if matrices:
            values = np.concatenate([values, *matrices])
        if len(self.names) < MAX_SERIES:
            return columns, values
        has_column = columns >= 0
        return columns[has_column], values[has_column]

    def _get_or_add(self, name: str) -> int:
        if name not in self._indices:
            if len(self.names) >= MAX_SERIES:
                return -1
            self._indices[name] = len(self.names)
            self.names.append(name)
        return self._indices[name]


def _series_names(key: tuple[Any, ...]) -> list[str]:
    names: list[str] = []
    for part in key:
        if isinstance(part, str):
            names.append(part)
        else:
            name, layers, heads = part
            names += [f"{name}/{layer}/{head}" for layer in range(layers) for head in range(heads)]
    return names
