"""JSON files that people exchange: read within limits or refused, written a line per item."""

import collections
import json
import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from xsake.bench.whole_file import write_whole
from xsake.errors import ArgumentError

MOST_DEPTH = 16
MOST_KEYS = 64  # of one object
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)  # possessive: takes no stack
_NOT_BRACKETS = re.compile(rb"[^][{}]++")


def read(path: Path, *, most_bytes: int) -> bytes:
    """What a file holds.

    Args:
        path: of the file.
        most_bytes: more are not read, and refused.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise ArgumentError("the file cannot be read", got=f"{path}: {error.strerror}") from error
    return data


def write(path: Path, text: str, *, most_bytes: int) -> None:
    """Replace a file in one step; nothing is written that `read` would refuse."""
    if (size := len(text.encode())) > most_bytes:
        raise ArgumentError("the file would be too large", got=size, expected=f"<= {most_bytes}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ArgumentError("the file cannot be written", got=f"{path}: {error}") from error


def parse(
    data: bytes, *, what: str, most_bytes: int, most_parts: int, most_values: int | None = None
) -> dict[str, Any]:
    """The object that `data` spells, checked before much memory is spent on it.

    Numbers may still be too large for a float: their types refuse what is not finite.

    Args:
        data: UTF-8.
        what: name of such a file, for messages.
        most_bytes: of the data.
        most_parts: objects and arrays, and likewise strings: each takes far more memory than text.
        most_values: of all arrays and objects together, counted as commas; None: `most_parts`.
    """
    try:
        _check_size(data, most_bytes, most_parts, most_values or most_parts)
        found = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
        )
    except (ValueError, RecursionError) as broken:
        raise refusal(what, str(broken)) from broken
    if not isinstance(found, dict):
        raise refusal(what, f"a {type(found).__name__}, not an object")
    return found


def validated[Kind: BaseModel](kind: type[Kind], document: dict[str, Any], *, what: str) -> Kind:
    """A parsed object as a value of its type, or the first thing that is wrong with it."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(step) for step in first["loc"]) or "the whole"
        raise refusal(what, f"{where}: {first['msg']}") from error


def refusal(what: str, why: str) -> ArgumentError:
    """The error for a file that is not what it should be."""
    return ArgumentError(
        f"the file is not {what}",
        got=why[:300],
        expected="UTF-8 JSON that fits its schema; every key once, every number finite",
        fix="copy the file again, or make it again from its profile or documents",
    )


def laid_out(document: dict[str, Any], opened: dict[str, int]) -> str:
    """An object as text that is compared line by line.

    Args:
        document: what JSON can spell.
        opened: levels of a field's value whose parts get lines of their own, by its key; 0 if it
            is not named.

    Example:
        >>> print(laid_out({"a": [1, 2], "b": [[1, 2], [3]]}, {"b": 1}), end="")
        {
         "a": [1,2],
         "b": [
          [1,2],
          [3]
         ]
        }
    """
    fields = (
        f" {_compact(key)}: {_opened(value, opened.get(key, 0), 1)}"
        for key, value in document.items()
    )
    return "{\n" + ",\n".join(fields) + "\n}\n"


def _opened(value: Any, levels: int, indent: int) -> str:
    if not levels or not value:
        return _compact(value)
    pad = " " * indent
    if isinstance(value, dict):
        parts = (
            f"{_compact(key)}: {_opened(v, levels - 1, indent + 1)}" for key, v in value.items()
        )
        left, right = "{}"
    else:
        parts = (_opened(part, levels - 1, indent + 1) for part in value)
        left, right = "[]"
    lines = ",\n".join(f"{pad} {part}" for part in parts)
    return f"{left}\n{lines}\n{pad}{right}"


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _check_size(data: bytes, most_bytes: int, most_parts: int, most_values: int) -> None:
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    parts = max(data.count(b"[") + data.count(b"{"), data.count(b'"') // 2)
    if parts > most_parts:
        raise ValueError(f"more than {most_parts} arrays, objects or strings")
    if data.count(b",") > most_values:
        raise ValueError(f"more than {most_values} values")
    depth = 0
    for bracket in _NOT_BRACKETS.sub(b"", _STRING.sub(b"", data)):
        depth += 1 if bracket in b"[{" else -1
        if not 0 <= depth <= MOST_DEPTH:
            raise ValueError(f"nested more than {MOST_DEPTH} deep, or closed before it is opened")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_KEYS:
        raise ValueError(f"an object with more than {MOST_KEYS} keys")
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no finite number")
