"""Figures about proved bounds from a file of any shape: numbers by path, lists as tables."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from xsake import _json

MOST_BYTES, MOST_PARTS = 2**20, 2**14
MOST_LETTERS = 300
WHAT = "figures about bounds"

Figure = float | int | bool | str


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a file says.

    Args:
        figures: single numbers and texts, by path.
        tables: lists of objects, by path: the numbers and texts of each.
    """

    figures: dict[str, Figure] = dataclasses.field(default_factory=dict)
    tables: dict[str, list[dict[str, Figure]]] = dataclasses.field(default_factory=dict)


def read_bounds(path: Path) -> Bounds:
    """Numbers and short texts of a JSON object; lists of anything but objects are left out.

    Args:
        path: of the file, at most 1 MB.
    """
    data = _json.read(path, max_bytes=MOST_BYTES)
    document = _json.loads(data, what=WHAT, max_bytes=MOST_BYTES, max_containers=MOST_PARTS)
    found = Bounds()
    _collect(document, "", found)
    return found


def _collect(value: Any, name: str, found: Bounds) -> None:
    if isinstance(value, dict):
        for key, part in value.items():
            _collect(part, f"{name} / {key}" if name else key, found)
    elif isinstance(value, list):
        rows = [_row(part) for part in value if isinstance(part, dict)]
        if any(rows):
            found.tables[name] = rows
    elif value is not None:
        found.figures[name] = _figure(value, name)


def _row(part: dict[str, Any]) -> dict[str, Figure]:
    plain = {key: value for key, value in part.items() if isinstance(value, Figure)}
    return {key: _figure(value, key) for key, value in plain.items()}


def _figure(value: Figure, name: str) -> Figure:
    if isinstance(value, float) and not math.isfinite(value):
        raise _json.invalid_file(WHAT, f"{name} is not finite")
    return value[:MOST_LETTERS] if isinstance(value, str) else value
