"""Figures about bounds from a JSON file: numbers by path, lists of objects as tables."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from xsake import _json

MAX_BYTES, MAX_CONTAINERS = 2**20, 2**14
MAX_TEXT = 300
WHAT = "figures about bounds"

Figure = float | int | bool | str


@dataclasses.dataclass(frozen=True)
class BoundFigures:
    """Content of a file."""

    figures: dict[str, Figure] = dataclasses.field(default_factory=dict)
    tables: dict[str, list[dict[str, Figure]]] = dataclasses.field(default_factory=dict)


def read_bounds(path: Path) -> BoundFigures:
    """Read numbers and texts of a JSON object; lists of other values are skipped."""
    data = _json.read(path, max_bytes=MAX_BYTES)
    document = _json.loads(data, what=WHAT, max_bytes=MAX_BYTES, max_containers=MAX_CONTAINERS)
    bounds = BoundFigures()
    _collect(document, "", bounds)
    return bounds


def _collect(value: Any, name: str, bounds: BoundFigures) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _collect(part, f"{name} / {key}" if name else key, bounds)
    elif isinstance(value, list):
        rows = [_row(part) for part in value if isinstance(part, dict)]
        if any(rows):
            bounds.tables[name] = rows
    elif value is not None:
        bounds.figures[name] = _figure(value, name)


def _row(part: dict[str, Any]) -> dict[str, Figure]:
    plain = {key: value for key, value in part.items() if isinstance(value, Figure)}
    return {key: _figure(value, key) for key, value in plain.items()}


def _figure(value: Figure, name: str) -> Figure:
    if isinstance(value, float) and not math.isfinite(value):
        raise _json.invalid_file(WHAT, f"{name} is not finite")
    return value[:MAX_TEXT] if isinstance(value, str) else value
