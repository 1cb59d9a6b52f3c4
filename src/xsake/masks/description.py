"""Owns the JSON form of masks: to_dict and from_dict; reads untrusted input without trust."""

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from xsake.errors import MaskError
from xsake.masks.algebra import And, Not, Or
from xsake.masks.bands import Causal, Full, Window
from xsake.masks.base import AbstractMask
from xsake.masks.patterns import Chunked, Longformer, Sinks, Strided
from xsake.masks.per_head import PerHead
from xsake.masks.random_cells import BigBird, Random
from xsake.masks.tables import Explicit, Segments

_FORMULAS = {
    kind.__name__: kind
    for kind in (
        BigBird, Causal, Chunked, Full, Longformer, Random, Sinks, Strided, Window
    )
}  # fmt: skip
_COMBINATIONS = {"And": And, "Or": Or}
DEEPEST = 32
MOST_TOKENS = 2**24  # of a Segments array; runs are short to write and long to store


def to_dict(mask: AbstractMask) -> dict[str, Any]:
    """A description of a mask made of dicts, lists, strings and numbers, ready for JSON.

    Args:
        mask: any mask of this package but FromFunction, whose function cannot be written down.

    Returns:
        A dict; `from_dict` turns it back into an equal mask.

    Example:
        >>> from xsake.masks import Causal, Window, to_dict
        >>> to_dict(Causal() & Window(left=7, right=0))["parts"]
        [{'mask': 'Causal'}, {'mask': 'Window', 'left': 7, 'right': 0}]
    """
    return _described(mask, 0)


def _described(mask: AbstractMask, depth: int) -> dict[str, Any]:
    kind = type(mask).__name__
    if depth > DEEPEST:
        raise MaskError("the mask is nested too deeply to write down", expected=f"<= {DEEPEST}")
    if (formula := _FORMULAS.get(kind)) is type(mask):
        names = [field.name for field in dataclasses.fields(formula)]
        return {"mask": kind} | {name: getattr(mask, name) for name in names}
    match mask:
        case And() | Or():
            return {"mask": kind, "parts": [_described(part, depth + 1) for part in mask.parts]}
        case Not():
            return {"mask": kind, "part": _described(mask.part, depth + 1)}
        case PerHead():
            members = [_described(member, depth + 1) for member in mask.members]
            return {"mask": kind, "members": members}
        case Segments():
            q_ids, kv_ids = (_runs(array) for array in mask._arrays())
            return {"mask": kind, "q_ids": q_ids, "kv_ids": kv_ids}
        case Explicit():
            bits = base64.b64encode(np.packbits(mask.array).tobytes()).decode("ascii")
            return {"mask": kind, "shape": list(mask.array.shape), "bits": bits}
    raise MaskError(
        "this mask cannot be written down",
        got=repr(mask),
        expected="masks of xsake.masks other than FromFunction",
        fix="describe the rule with & | ~ of structured masks, or use Explicit",
    )


def _runs(ids: np.ndarray) -> list[list[int]]:
    """Ids as [id, repeats] pairs."""
    if ids.size > MOST_TOKENS:
        raise MaskError("too many tokens to write down", got=ids.size, expected=MOST_TOKENS)
    starts = np.flatnonzero(np.diff(ids, prepend=ids[:1] - 1)) if ids.size else np.zeros(0, int)
    repeats = np.diff(np.append(starts, ids.size))
    return np.stack([ids[starts], repeats], axis=1).tolist()


def from_dict(description: Mapping[str, Any]) -> AbstractMask:
    """The mask that `to_dict` described; anything else raises MaskError.

    Sizes are checked before memory is taken, and nothing in the description is executed.

    Args:
        description: what `to_dict` returned, perhaps by way of a JSON file.

    Returns:
        A mask equal to the one described.

    Example:
        >>> from xsake.masks import from_dict
        >>> from_dict({"mask": "Window", "left": 7, "right": None})
        Window(left=7, right=None)
    """
    return _built(description, 0)


def _built(description: Any, depth: int) -> AbstractMask:
    if depth > DEEPEST:
        raise MaskError("the description is nested too deeply", expected=f"<= {DEEPEST}")
    if not isinstance(description, Mapping) or not isinstance(description.get("mask"), str):
        raise _malformed(description, "an object with the name of a mask under 'mask'")
    kind = description["mask"]
    if kind in _FORMULAS:
        names = [field.name for field in dataclasses.fields(_FORMULAS[kind])]
        values = _entries(description, *names)
        return _FORMULAS[kind](*map(_checked_number, names, values))
    if kind in _COMBINATIONS:
        (parts,) = _entries(description, "parts")
        return _COMBINATIONS[kind](_built_list(parts, depth, least=2))
    match kind:
        case "Not":
            (part,) = _entries(description, "part")
            return Not(_built(part, depth + 1))
        case "PerHead":
            (members,) = _entries(description, "members")
            return PerHead(_built_list(members, depth, least=1))
        case "Segments":
            return Segments(*(_expanded(runs) for runs in _entries(description, "q_ids", "kv_ids")))
        case "Explicit":
            return _built_explicit(*_entries(description, "shape", "bits"))
    raise _malformed(kind, "the name of a mask of xsake.masks")


def _entries(description: Mapping[str, Any], *names: str) -> list[Any]:
    """The values under exactly these names."""
    if set(description) != {"mask", *names}:
        raise _malformed(sorted(map(str, description)), f"exactly the keys {['mask', *names]}")
    return [description[name] for name in names]


def _checked_number(name: str, value: Any) -> Any:
    """A field of a formula, its type checked; the mask itself checks the range."""
    if name == "keep" and type(value) in (int, float):
        return float(value)
    if type(value) is int or (value is None and name in ("left", "right")):
        return value
    raise _malformed(f"{name}={value!r}", "a number of the right kind")


def _built_list(descriptions: Any, depth: int, *, least: int) -> tuple[AbstractMask, ...]:
    if not isinstance(descriptions, list) or len(descriptions) < least:
        raise _malformed(descriptions, f"a list of at least {least} masks")
    return tuple(_built(description, depth + 1) for description in descriptions)


def _expanded(runs: Any) -> np.ndarray:
    """Ids from [id, repeats] pairs, their total checked first."""
    if not isinstance(runs, list) or not all(
        isinstance(run, list) and len(run) == 2 and all(type(number) is int for number in run)
        for run in runs
    ):
        raise _malformed(runs, "a list of [id, repeats] pairs")
    limits = np.iinfo(np.int32)
    if any(not limits.min <= name <= limits.max or repeats < 1 for name, repeats in runs):
        raise _malformed(runs, "ids that fit int32, repeated at least once")
    if sum(repeats for _, repeats in runs) > MOST_TOKENS:
        raise _malformed(runs, f"at most {MOST_TOKENS} tokens")
    ids, repeats = np.array(runs, np.int64).reshape(-1, 2).T
    return np.repeat(ids, repeats).astype(np.int32)


def _built_explicit(shape: Any, bits: Any) -> Explicit:
    if (
        not isinstance(shape, list)
        or len(shape) not in (2, 3)
        or not all(type(size) is int and size >= 0 for size in shape)
        or not isinstance(bits, str)
    ):
        raise _malformed({"shape": shape, "bits": bits}, "two or three sizes and a base64 string")
    count = 1
    for size in shape:
        count *= size  # Python's integers cannot overflow
    try:
        packed = base64.b64decode(bits, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _malformed(bits, "base64") from error
    if len(packed) != (count + 7) // 8:
        raise _malformed(f"{len(packed)} bytes", f"the {(count + 7) // 8} bytes of shape {shape}")
    flat = np.unpackbits(np.frombuffer(packed, np.uint8), count=count)
    return Explicit(flat.astype(bool).reshape(shape))


def _malformed(got: Any, expected: str) -> MaskError:
    text = repr(got)
    return MaskError(
        "this does not describe a mask",
        got=text if len(text) <= 200 else f"{text[:200]}...",
        expected=expected,
    )
