"""Field types of HADS files: arrays of six digits, and dataclasses read strictly."""

import dataclasses
import json
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int
from pydantic import BeforeValidator, PlainSerializer, PlainValidator, TypeAdapter, WithJsonSchema

from xsake._provenance import Environment
from xsake.hads.budget import AlwaysOn


def _fields_of(kind: type) -> BeforeValidator:
    """Reads a flat dataclass strictly: its fields, of their types, and nothing else."""
    adapter = TypeAdapter(kind)
    names = {field.name for field in dataclasses.fields(kind)}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() - names:
            raise ValueError(f"{min(value.keys() - names)!r} is no field of it")
        return adapter.validate_json(json.dumps(value), strict=True)

    return BeforeValidator(read)


def _require_numbers(values: list | tuple) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _require_numbers(value)
        elif type(value) not in (int, float):
            raise ValueError("something that is no number")


def _rounded(value: Any) -> np.ndarray:
    """Read-only float64 of 6 significant digits, so that a file holds exactly what memory does."""
    if not isinstance(value, np.ndarray):
        _require_numbers([value])
        value = np.array(value)
    if value.dtype.kind not in "fiu" or not np.isfinite(value).all():
        raise ValueError("numbers that are not finite")
    digits = [float(f"{number:.6g}") for number in value.ravel().tolist()]
    array = np.array(digits, np.float64).reshape(value.shape) + 0.0  # no negative zeros
    array.flags.writeable = False
    return array


def _whole(value: Any) -> np.ndarray:
    """Read-only int32."""
    numbers = _rounded(value)
    if (numbers != np.clip(np.rint(numbers), 0, 10**6)).any():
        raise ValueError("numbers that are no indices")
    array = numbers.astype(np.int32)
    array.flags.writeable = False
    return array


def _nested(levels: int, kind: str = "number") -> WithJsonSchema:
    schema: dict[str, Any] = {"type": kind}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return WithJsonSchema(schema)


_READ, _WRITTEN = PlainValidator(_rounded), PlainSerializer(lambda array: array.tolist())
PerHead = Annotated[Float[np.ndarray, "L Hq"], _READ, _WRITTEN, _nested(2)]
PerHeadRow = Annotated[Float[np.ndarray, "L Hq X"], _READ, _WRITTEN, _nested(3)]
Components = Annotated[
    Int[np.ndarray, "L Hk D"], PlainValidator(_whole), _WRITTEN, _nested(3, "integer")
]

Always = Annotated[AlwaysOn, _fields_of(AlwaysOn)]
Machine = Annotated[Environment, _fields_of(Environment)]
