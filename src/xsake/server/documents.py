"""Documents: plans, certificates and benchmark rows, checked and sent as their files have them.

A document is parsed to see that it is a JSON object, and its bytes are sent: to build an answer
from the parsed values would take ten times as long. One document is parsed at a time, so that
memory has a bound.
"""

import io
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np

from xsake.server.registry import read_document

MAX_BYTES = 2**23  # of a document, and of the rows of one answer
MAX_ROWS_BYTES = 2**25  # of a file of rows
_MAX_DEPTH = 32
_PARSING = threading.Lock()


class DocumentError(Exception):
    """A document cannot be sent; says why, without its path."""


def read_json_object(path: Path) -> bytes:
    """Read a file that is one JSON object; numbers that JSON does not have become null.

    Args:
        path: of a plan or a certificate.
    """
    return _checked(_read(path, MAX_BYTES))


def read_rows(path: Path, begin: int, count: int) -> tuple[list[bytes], bool]:
    """Read some lines of a file of JSON objects; also whether they are its last ones.

    There are fewer than `count` where their bytes would be too many for one answer.

    Args:
        path: of the file.
        begin: first line, empty ones aside.
        count: of lines, at most.
    """
    rows: list[bytes] = []
    num_bytes = number = 0
    for line in io.BytesIO(_read(path, MAX_ROWS_BYTES)):
        if not (text := line.strip()):
            continue
        number += 1
        if number <= begin:
            continue
        num_bytes += len(text)
        if len(rows) == count or (rows and num_bytes > MAX_BYTES):
            return rows, False
        rows.append(_checked(text))
    return rows, True


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        return read_document(path, max_bytes)
    except OSError as error:
        raise DocumentError(f"the document cannot be read now: {error.strerror}") from error


def _checked(text: bytes) -> bytes:
    """A JSON object in UTF-8, not too deep and not too large."""
    has_others = False

    def replace(_: str) -> None:
        nonlocal has_others
        has_others = True

    if len(text) > MAX_BYTES or _depth(text) > _MAX_DEPTH:
        raise DocumentError("the document is too large or too deep")
    with _PARSING:
        try:
            found = json.loads(text.decode(), parse_constant=replace)
        except (ValueError, RecursionError) as error:
            raise DocumentError("the document is not what its name says") from error
        if not isinstance(found, dict):
            raise DocumentError("the document is not what its name says")
        return json.dumps(_finite(found)).encode() if has_others else text


def _depth(text: bytes) -> int:
    """How deep brackets may be nested at most; those inside of strings count too."""
    data = np.frombuffer(text, np.uint8)
    change = np.zeros(len(data), np.int8)
    change[(data == ord("[")) | (data == ord("{"))] = 1
    change[(data == ord("]")) | (data == ord("}"))] = -1
    return int(np.cumsum(change, dtype=np.int32).max(initial=0))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
