"""Lines of a growing metrics file: complete, bounded and validated."""

import itertools
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from xsake.observability.log import is_step
from xsake.observability.metrics import MAX_SERIES, METRICS, rename_metrics
from xsake.server.artifacts import open_regular

MAX_LINE = 2**24  # bytes; a longer line is skipped
MAX_NUMBER = float(np.finfo(np.float32).max)  # the index stores float32
_MAX_SIDE = 512  # layers or heads of a matrix
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ENDINGS = ("done", "stopped", "failed")
_CELLS = frozenset({int, float, bool, type(None)})
_NOT_JSON = object()  # NaN and Infinity, which JSON does not have
_DECODER = json.JSONDecoder(parse_constant=lambda _: _NOT_JSON)


class MetricsLine(NamedTuple):
    """Validated metrics line of a step or an event; NaN marks missing numbers."""

    fields: dict[str, Any]  # step and wall; or event with from_step, name, steps or ending
    scalars: dict[str, float]
    matrices: dict[str, np.ndarray]  # float64, by layer and head
    num_dropped: int  # invalid values


def read_line(text: bytes) -> MetricsLine | None:
    """Parse and validate a line without its newline; None if it is neither a step nor an event.

    Example:
        >>> read_line(b'{"step": 3, "loss": "x"}')
        MetricsLine(fields={'step': 3}, scalars={'loss': nan}, matrices={}, num_dropped=1)
        >>> read_line(b'{"step": "x", "loss": 2.5}') is None
        True
    """
    try:
        line = text.decode().strip()
        given, end = _DECODER.raw_decode(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or end != len(line):
        return None
    return _read_event(given) if "event" in given else _read_step(given)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a number or boolean in the range of float32."""
    return isinstance(value, int | float) and -MAX_NUMBER <= value <= MAX_NUMBER


def _read_event(given: dict[str, Any]) -> MetricsLine | None:
    checks: dict[str, Callable[[Any], bool]] = {"wall": is_number}
    fields: dict[str, Any] = {"event": given["event"]}
    match given["event"]:
        case "began" if is_step(given.get("from_step")):
            fields["from_step"] = given["from_step"]
            checks |= {"name": _is_name, "steps": is_step}
        case "ended":
            fields["ending"] = given["ending"] if given.get("ending") in _ENDINGS else "stopped"
            checks |= {"step": is_step}
        case _:
            return None
    values = {name: given[name] for name in checks if given.get(name) is not None}
    usable = {name: value for name, value in values.items() if checks[name](value)}
    return MetricsLine(usable | fields, {}, {}, len(values) - len(usable))


def _read_step(given: dict[str, Any]) -> MetricsLine | None:
    if not is_step(given.get("step")):
        return None
    fields: dict[str, Any] = {"step": given["step"]}
    scalars: dict[str, float] = {}
    matrices: dict[str, np.ndarray] = {}
    num_dropped = 0
    for name, value in rename_metrics(given).items():
        if name not in METRICS and name != "wall":
            continue
        if name != "wall" and METRICS[name].axes:
            matrix = _read_matrix(value)
            num_dropped += value is not None and matrix is None
            if matrix is not None:
                matrices[name] = matrix
        else:
            is_valid = is_number(value)
            num_dropped += value is not None and not is_valid
            (fields if name == "wall" else scalars)[name] = value if is_valid else math.nan
    return MetricsLine(fields, scalars, matrices, num_dropped)


def _read_matrix(value: Any) -> np.ndarray | None:
    """Parse a matrix by layer and head; None unless all rows are lists of equal length."""
    if not isinstance(value, list) or not 0 < len(value) <= _MAX_SIDE:
        return None
    if set(map(type, value)) != {list} or len(set(map(len, value))) != 1:
        return None
    if not 0 < len(value[0]) <= _MAX_SIDE or len(value) * len(value[0]) > MAX_SERIES:
        return None
    if not set(map(type, itertools.chain.from_iterable(value))) <= _CELLS:
        return None
    try:
        matrix = np.array(value, np.float64)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return None if (np.abs(matrix) > MAX_NUMBER).any() else matrix


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


class LineReader:
    """Read complete lines from an offset; an unfinished last line is left for later."""

    def __init__(self, file: BinaryIO, offset: int, *, is_inside_long: bool = False):
        self._file, self.is_inside_long = file, is_inside_long
        self.seek(offset)

    def seek(self, offset: int) -> None:
        """Continue at the start of another line."""
        self.offset = offset
        self._file.seek(offset)

    def next_line(self) -> bytes | None:
        """Return the next complete line without its newline; None at the end of the file.

        A line above the size limit is skipped in chunks: the first chunk returns an invalid line,
        the others return empty lines. `offset` is the position of the next read.
        """
        text = self._file.readline(MAX_LINE)
        is_complete, was_inside = text.endswith(b"\n"), self.is_inside_long
        if not is_complete and len(text) < MAX_LINE and not (was_inside and text):
            return None
        self.offset += len(text)
        self.is_inside_long = not is_complete
        if was_inside:
            return b""
        return text[:-1] if is_complete else b"\0"


def file_identity(path: Path) -> str:
    """Return an identity of an append-only file: its inode and the start of its first line."""
    with open_regular(path) as file:
        begin = file.read(4096).partition(b"\n")[0][:256]
        return f"{os.fstat(file.fileno()).st_ino}:{begin.hex()}"
