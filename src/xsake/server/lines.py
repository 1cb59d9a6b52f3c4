"""Validate metrics lines: steps, events and numbers."""

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xsake.observability.metrics import MAX_SERIES, METRICS, rename_metrics

MAX_STEP = 2**53  # integers above it are inexact in float64 and JavaScript
MAX_NUMBER = float(np.finfo(np.float32).max)  # the index stores float32
_MAX_SIDE = 512  # layers or heads of a matrix
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_ENDINGS = ("done", "stopped", "failed")
_CELLS = frozenset({int, float, bool, type(None)})
_NOT_JSON = object()  # NaN and Infinity, which JSON does not have
_DECODER = json.JSONDecoder(parse_constant=lambda _: _NOT_JSON)


class MetricsLine(NamedTuple):
    """Validated metrics line.

    Args:
        fields: `step` and metrics, matrices as float64 arrays, NaN for missing numbers; or `event`
            with `from_step`, `name`, `steps` or `ending`.
        num_dropped: number of invalid values.
    """

    fields: dict[str, Any]
    num_dropped: int


def read_line(text: bytes) -> MetricsLine | None:
    """Parse and validate a line; None if it is neither a step nor an event.

    Args:
        text: without its newline.

    Example:
        >>> read_line(b'{"step": 3, "loss": 2.5, "drift": "x"}')
        MetricsLine(fields={'step': 3, 'loss': 2.5, 'drift': nan}, num_dropped=1)
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
    fields: dict[str, Any] = {"event": given["event"]}
    checks: dict[str, Callable[[Any], bool]] = {"wall": is_number}
    match given["event"]:
        case "began" if _is_step(given.get("from_step")):
            fields["from_step"] = given["from_step"]
            checks |= {"name": _is_name, "steps": _is_step}
        case "ended":
            fields["ending"] = given["ending"] if given.get("ending") in _ENDINGS else "stopped"
            checks |= {"step": _is_step}
        case _:
            return None
    values = {name: given[name] for name in checks if given.get(name) is not None}
    usable = {name: value for name, value in values.items() if checks[name](value)}
    return MetricsLine(usable | fields, len(values) - len(usable))


def _read_step(given: dict[str, Any]) -> MetricsLine | None:
    if not _is_step(given.get("step")):
        return None
    fields: dict[str, Any] = {"step": given["step"]}
    num_dropped = 0
    for name, value in rename_metrics(given).items():
        metric = METRICS.get(name)
        if metric is None and name != "wall":
            continue
        if metric is not None and metric.axes:
            matrix = None if value is None else _read_matrix(value)
            num_dropped += value is not None and matrix is None
            if matrix is not None:
                fields[name] = matrix
        elif is_number(value):
            fields[name] = value
        else:
            num_dropped += value is not None
            fields[name] = math.nan
    return MetricsLine(fields, num_dropped)


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


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_STEP


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None
