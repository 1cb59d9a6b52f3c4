"""Validate plans, certificates and benchmark rows, and return their bytes.

A document is parsed for validation and sent as stored: serializing the parsed values would take
ten times as long. One document is parsed at a time to bound memory.
"""

import io
import json
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np

from xsake.server.registry import read_document

MAX_BYTES = 2**23  # of a document or one response of rows
MAX_ROWS_BYTES = 2**25  # of a file of rows
_MAX_DEPTH = 32
_PARSING = threading.Lock()


class DocumentError(Exception):
    """A document cannot be sent; the message has no path."""


def read_json_object(path: Path) -> bytes:
    """Read a JSON object; non-finite numbers become null.

    Args:
        path: of a plan or a certificate.
    """
    return _validate(_read(path, MAX_BYTES))


def read_rows(path: Path, begin: int, count: int) -> tuple[list[bytes], bool]:
    """Read lines of a JSONL file; also return whether they are its last ones.

    Returns fewer than `count` lines if they exceed the size limit of a response.

    Args:
        path: of the file.
        begin: first line, not counting empty ones.
        count: maximum number of lines.
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
        rows.append(_validate(text))
    return rows, True


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        return read_document(path, max_bytes)
    except OSError as error:
        raise DocumentError(f"the document is unreadable: {error.strerror}") from error


def _validate(text: bytes) -> bytes:
    """Check that a text is a JSON object within the limits of size and depth."""
    has_nonfinite = False

    def replace(_: str) -> None:
        nonlocal has_nonfinite
        has_nonfinite = True

    if len(text) > MAX_BYTES or _depth(text) > _MAX_DEPTH:
        raise DocumentError("the document is too large or too deep")
    with _PARSING:
        try:
            document = json.loads(text.decode(), parse_constant=replace)
        except (ValueError, RecursionError) as error:
            raise DocumentError("the document is not a JSON object") from error
        if not isinstance(document, dict):
            raise DocumentError("the document is not a JSON object")
        return json.dumps(_replace_nonfinite(document)).encode() if has_nonfinite else text


def _depth(text: bytes) -> int:
    """Return an upper bound of the nesting depth; brackets inside strings are counted too."""
    data = np.frombuffer(text, np.uint8)
    change = np.zeros(len(data), np.int8)
    change[(data == ord("[")) | (data == ord("{"))] = 1
    change[(data == ord("]")) | (data == ord("}"))] = -1
    return int(np.cumsum(change, dtype=np.int32).max(initial=0))


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_nonfinite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_replace_nonfinite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
