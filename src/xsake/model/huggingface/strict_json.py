"""JSON from strangers: an object or a clean error, with nothing in it that says two things."""

import collections
import json
import math
from typing import Any

from xsake.errors import CheckpointError

MAX_VALUES = 2**20  # a safetensors header has about 9 for each tensor


def parse(text: bytes, name: str, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """The object that `text` spells.

    Args:
        text: UTF-8.
        name: of the file, for messages.
        max_values: arrays, objects and what is between commas: each takes far more memory than
            text.
    """
    try:
        if sum(text.count(mark) for mark in (b",", b"[", b"{")) > max_values:
            raise ValueError(f"more than {max_values} values")
        found = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (ValueError, RecursionError) as broken:
        raise CheckpointError(
            f"{name} is not proper JSON",
            got=str(broken)[:200],
            expected="UTF-8 JSON; every key once, every number finite, no endless nesting",
            fix="copy or download the file again, or correct it by hand",
        ) from broken
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{name} is not a JSON object",
            got=type(found).__name__,
            expected='{"key": value, ...}',
            fix="copy or download the file again",
        )
    return found


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = collections.Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number
