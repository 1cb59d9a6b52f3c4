"""Mask serialization to JSON types; `from_dict` validates untrusted input."""

import base64
import binascii
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from xsake.errors import MaskError
from xsake.masks.algebra import And, Not, Or, PerHead
from xsake.masks.array_masks import Explicit, Segments
from xsake.masks.base import AbstractMask
from xsake.masks.patterns import PARAMETRIC

_LISTS = {"And": (And, "parts", 2), "Or": (Or, "parts", 2), "PerHead": (PerHead, "members", 1)}
MAX_DEPTH = 32
MAX_TOKENS = 2**24  # of a Segments array, whose run-length encoding is short


def to_dict(mask: AbstractMask) -> dict[str, Any]:
    """Serialize a mask to JSON types, from which `from_dict` restores an equal mask.

    A FromFunction mask raises MaskError, because its function cannot be serialized.

    Example:
        >>> from xsake.masks import Causal, Window, to_dict
        >>> to_dict(Causal() & Window(left=7, right=0))["parts"]
        [{'mask': 'Causal'}, {'mask': 'Window', 'left': 7, 'right': 0}]
    """
    return _encode(mask, 0)


def _encode(mask: AbstractMask, depth: int) -> dict[str, Any]:
    mask_name = type(mask).__name__
    if depth > MAX_DEPTH:
        raise MaskError("nesting", "the mask is nested too deeply", expected=f"<= {MAX_DEPTH}")
    if (mask_type := PARAMETRIC.get(mask_name)) is type(mask):
        names = [field.name for field in dataclasses.fields(mask_type)]
        return {"mask": mask_name} | {name: getattr(mask, name) for name in names}
    match mask:
        case And() | Or() | PerHead():
            name = _LISTS[mask_name][1]
            parts = [_encode(part, depth + 1) for part in getattr(mask, name)]
            return {"mask": mask_name, name: parts}
        case Not():
            return {"mask": mask_name, "part": _encode(mask.part, depth + 1)}
        case Segments():
            q_ids, kv_ids = (_encode_runs(array) for array in mask._arrays())
            return {"mask": mask_name, "q_ids": q_ids, "kv_ids": kv_ids}
        case Explicit():
            bits = base64.b64encode(np.packbits(mask.array).tobytes()).decode("ascii")
            return {"mask": mask_name, "shape": list(mask.array.shape), "bits": bits}
    raise MaskError(
        "not-serializable",
        "this mask cannot be serialized",
        got=repr(mask),
        expected="masks of xsake.masks other than FromFunction",
        fix="build the mask from parametric masks with & | ~, or use Explicit",
    )


def _encode_runs(ids: np.ndarray) -> list[list[int]]:
    """Run-length encode ids as [id, repeats] pairs."""
    if ids.size > MAX_TOKENS:
        raise MaskError(
            "too-many-tokens", "too many tokens to serialize", got=ids.size, expected=MAX_TOKENS
        )
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)) if ids.size else np.zeros(0, int)
    repeats = np.diff(np.append(starts, ids.size))
    return np.stack([ids[starts], repeats], axis=1).tolist()


def from_dict(description: Mapping[str, Any]) -> AbstractMask:
    """Restore a mask from `to_dict`; malformed input raises MaskError.

    Sizes are validated before allocation; nothing in the description is executed.

    Example:
        >>> from xsake.masks import from_dict
        >>> from_dict({"mask": "Window", "left": 7, "right": None})
        Window(left=7, right=None)
    """
    return _decode(description, 0)


def _decode(description: Any, depth: int) -> AbstractMask:
    if depth > MAX_DEPTH:
        raise MaskError(
            "description-nesting",
            "the description is nested too deeply",
            expected=f"<= {MAX_DEPTH}",
        )
    if not isinstance(description, Mapping) or not isinstance(description.get("mask"), str):
        raise _format_error(description, "an object with a mask name under 'mask'")
    mask_name = description["mask"]
    if mask_name in PARAMETRIC:
        names = [field.name for field in dataclasses.fields(PARAMETRIC[mask_name])]
        values = _entries(description, *names)
        return PARAMETRIC[mask_name](*map(_check_param, names, values))
    if mask_name in _LISTS:
        mask_type, name, min_length = _LISTS[mask_name]
        (parts,) = _entries(description, name)
        if not isinstance(parts, list) or len(parts) < min_length:
            raise _format_error(parts, f"a list of at least {min_length} masks")
        return mask_type(tuple(_decode(part, depth + 1) for part in parts))
    match mask_name:
        case "Not":
            (part,) = _entries(description, "part")
            return Not(_decode(part, depth + 1))
        case "Segments":
            return Segments(*map(_decode_runs, _entries(description, "q_ids", "kv_ids")))
        case "Explicit":
            return _decode_explicit(*_entries(description, "shape", "bits"))
    raise _format_error(mask_name, "the name of a mask of xsake.masks")


def _entries(description: Mapping[str, Any], *names: str) -> list[Any]:
    """Return the values of exactly these keys."""
    if set(description) != {"mask", *names}:
        raise _format_error(sorted(map(str, description)), f"exactly the keys {['mask', *names]}")
    return [description[name] for name in names]


def _check_param(name: str, value: Any) -> Any:
    """Check the type of a parameter; the mask itself checks the range."""
    if name == "keep" and type(value) in (int, float):
        return float(value)
    if type(value) is int or (value is None and name in ("left", "right")):
        return value
    raise _format_error(f"{name}={value!r}", "a number of the parameter's type")


def _decode_runs(runs: Any) -> np.ndarray:
    """Decode [id, repeats] pairs after checking their total."""
    if not isinstance(runs, list) or not all(
        isinstance(run, list) and len(run) == 2 and all(type(number) is int for number in run)
        for run in runs
    ):
        raise _format_error(runs, "a list of [id, repeats] pairs")
    limits = np.iinfo(np.int32)
    if any(not limits.min <= value <= limits.max or repeats < 1 for value, repeats in runs):
        raise _format_error(runs, "ids that fit int32, repeated at least once")
    if sum(repeats for _, repeats in runs) > MAX_TOKENS:
        raise _format_error(runs, f"at most {MAX_TOKENS} tokens")
    ids, repeats = np.array(runs, np.int64).reshape(-1, 2).T
    return np.repeat(ids, repeats).astype(np.int32)


def _decode_explicit(shape: Any, bits: Any) -> Explicit:
    if (
        not isinstance(shape, list)
        or len(shape) not in (2, 3)
        or not all(type(size) is int and size >= 0 for size in shape)
        or not isinstance(bits, str)
    ):
        raise _format_error({"shape": shape, "bits": bits}, "2 or 3 sizes and a base64 string")
    count = math.prod(shape)  # Python integers do not overflow
    try:
        packed = base64.b64decode(bits, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _format_error(bits, "base64") from error
    if len(packed) != (count + 7) // 8:
        raise _format_error(f"{len(packed)} bytes", f"{(count + 7) // 8} bytes for {shape=}")
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), count=count)
    return Explicit(flat.astype(bool).reshape(shape))


def _format_error(got: Any, expected: str) -> MaskError:
    text = repr(got)
    return MaskError(
        "description",
        "invalid mask description",
        got=text if len(text) <= 200 else f"{text[:200]}...",
        expected=expected,
    )
