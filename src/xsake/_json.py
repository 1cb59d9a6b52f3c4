"""Strict JSON for files from elsewhere: bounded before parsing, every key once, numbers finite."""

import collections
import json
import math
import re
from pathlib import Path
from typing import Any

from xsake._io import atomic_write
from xsake.errors import ArgumentError, XsakeError

MAX_DEPTH = 16
MAX_KEYS = 64  # of one object
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # possessive: takes no stack
_NOT_BRACKETS = re.compile(rb"[^][{}]++")


def read(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a file, one byte more than `max_bytes` at most.

    Args:
        path: of the file.
        max_bytes: of the limit that `loads` checks.
    """
    try:
        with path.open("rb") as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise ArgumentError(
            "file-unreadable", "the file cannot be read", got=f"{path}: {error.strerror}"
        ) from error


def write(path: Path, text: str, *, max_bytes: int) -> None:
    """Replace a file in one step; a text that `loads` would reject for its size is an error."""
    if (size := len(text.encode())) > max_bytes:
        raise ArgumentError(
            "file-too-large-to-write",
            "the file would be too large",
            got=size,
            expected=f"<= {max_bytes}",
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text)
    except OSError as error:
        raise ArgumentError(
            "file-unwritable", "the file cannot be written", got=f"{path}: {error}"
        ) from error


def loads(
    data: bytes,
    *,
    what: str,
    max_bytes: int,
    max_containers: int,
    max_values: int | None = None,
    max_keys: int | None = MAX_KEYS,
    error_type: type[XsakeError] = ArgumentError,
) -> dict[str, Any]:
    """Parse a JSON object; limits are checked before memory is allocated for it.

    Args:
        data: UTF-8.
        what: name of such a file, for messages.
        max_bytes: of the data.
        max_containers: objects and arrays, and likewise strings: each takes more memory than text.
        max_values: of all arrays and objects together, counted as commas; None: `max_containers`.
        max_keys: of one object; None: `max_values`.
        error_type: raised for anything that is not such an object.
    """

    def to_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if max_keys is not None and len(pairs) > max_keys:
            raise ValueError(f"an object with more than {max_keys} keys")
        value = dict(pairs)
        if len(value) != len(pairs):
            twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"the key {twice!r} is there twice")
        return value

    try:
        _check_size(data, max_bytes, max_containers, max_values or max_containers)
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=to_object,
            parse_float=_to_finite,
            parse_constant=_to_finite,
        )
    except (ValueError, RecursionError) as error:
        raise invalid_file(what, str(error), error_type) from error
    if not isinstance(value, dict):
        raise invalid_file(what, f"a {type(value).__name__}, not an object", error_type)
    return value


def invalid_file(what: str, why: str, error_type: type[XsakeError] = ArgumentError) -> XsakeError:
    """Make the error for a file that is not what its name says."""
    return error_type(
        "file-format",
        f"the file is not {what}",
        got=why[:300],
        expected="a JSON object in UTF-8 that fits its schema; every key once, numbers finite",
        fix="copy or download the file again, or make it again from its source",
    )


def dumps(document: dict[str, Any], opened: dict[str, int]) -> str:
    """Format an object with a line per field, for line-based diffs.

    Args:
        document: of JSON values.
        opened: levels of a field's value whose items get lines of their own, by key; 0 if absent.

    Example:
        >>> print(dumps({"a": [1, 2], "b": [[1, 2], [3]]}, {"b": 1}), end="")
        {
         "a": [1,2],
         "b": [
          [1,2],
          [3]
         ]
        }
    """
    fields = (
        f" {_compact(key)}: {_format(value, opened.get(key, 0), 1)}"
        for key, value in document.items()
    )
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _format(value: Any, levels: int, indent: int) -> str:
    if not levels or not value:
        return _compact(value)
    pad = " " * indent
    if isinstance(value, dict):
        parts = (
            f"{_compact(key)}: {_format(v, levels - 1, indent + 1)}" for key, v in value.items()
        )
        left, right = "{}"
    else:
        parts = (_format(part, levels - 1, indent + 1) for part in value)
        left, right = "[]"
    lines = ",\n".join(f"{pad} {part}" for part in parts)
    return f"{left}\n{lines}\n{pad}{right}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _check_size(data: bytes, max_bytes: int, max_containers: int, max_values: int) -> None:
    if len(data) > max_bytes:
        raise ValueError(f"more than {max_bytes} bytes")
    containers = max(data.count(b"[") + data.count(b"{"), data.count(b'"') // 2)
    if containers > max_containers:
        raise ValueError(f"more than {max_containers} arrays, objects or strings")
    if data.count(b",") > max_values:
        raise ValueError(f"more than {max_values} values")
    depth = 0
    for bracket in _NOT_BRACKETS.sub(b"", _STRING.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if not 0 <= depth <= MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep, or closed before it is opened")


def _to_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number
