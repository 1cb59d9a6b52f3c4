"""Pydantic field types of plans and profiles: arrays of six digits, strict dataclasses."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from jaxtyping import Float, Int
from pydantic import BeforeValidator, PlainSerializer, PlainValidator, TypeAdapter, WithJsonSchema

from xsake._provenance import Environment
from xsake.hads.budget import ForcedBlocks


def _strict_dataclass(cls: type, keys: Mapping[str, str] | None = None) -> BeforeValidator:
    """Validate a flat dataclass strictly; `keys` maps keys of the file to field names."""
    adapter = TypeAdapter(cls)
    keys = {field.name: field.name for field in dataclasses.fields(cls)} if keys is None else keys

    def parse(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.keys() - keys.keys():
            raise ValueError(f"unknown key {min(value.keys() - keys.keys())!r}")
        fields = {keys[key]: part for key, part in value.items()}
        return adapter.validate_json(json.dumps(fields), strict=True)

    return BeforeValidator(parse)


def _require_numbers(values: list | tuple) -> None:
    for value in values:
        if isinstance(value, list | tuple):
            _require_numbers(value)
        elif type(value) not in (int, float):
            raise ValueError("expected numbers")


def _round_array(value: Any) -> np.ndarray:
    """Return a read-only float64 array of 6 significant digits, equal to what the file stores."""
    if not isinstance(value, np.ndarray):
        _require_numbers([value])
        value = np.array(value)
    if value.dtype.kind not in "fiu" or not np.isfinite(value).all():
        raise ValueError("expected finite numbers")
    digits = [float(f"{number:.6g}") for number in value.ravel().tolist()]
    array = np.array(digits, np.float64).reshape(value.shape) + 0.0  # no negative zeros
    array.flags.writeable = False
    return array


def _index_array(value: Any) -> np.ndarray:
    """Return a read-only int32 array of indices."""
    numbers = _round_array(value)
    if (numbers != np.clip(np.rint(numbers), 0, 10**6)).any():
        raise ValueError("expected indices from 0 to 1000000")
    array = numbers.astype(np.int32)
    array.flags.writeable = False
    return array


def _array_schema(ndim: int, item: str = "number") -> WithJsonSchema:
    schema: dict[str, Any] = {"type": item}
    for _ in range(ndim):
        schema = {"type": "array", "items": schema}
    return WithJsonSchema(schema)


_PARSE, _DUMP = PlainValidator(_round_array), PlainSerializer(lambda array: array.tolist())
PerHead = Annotated[Float[np.ndarray, "L Hq"], _PARSE, _DUMP, _array_schema(2)]
PerHeadRow = Annotated[Float[np.ndarray, "L Hq X"], _PARSE, _DUMP, _array_schema(3)]
Components = Annotated[
    Int[np.ndarray, "L Hk D"], PlainValidator(_index_array), _DUMP, _array_schema(3, "integer")
]

# Files of every version call the numbers of forced blocks `sinks` and `locals`.
ForcedField = Annotated[
    ForcedBlocks,
    _strict_dataclass(ForcedBlocks, {"sinks": "num_sink", "locals": "num_local"}),
    PlainSerializer(lambda forced: {"sinks": forced.num_sink, "locals": forced.num_local}),
    WithJsonSchema({"type": "object", "additionalProperties": False, "properties": {
        "sinks": {"type": "integer", "default": 1, "description": "first kv blocks"},
        "locals": {"type": "integer", "default": 2, "description": "last causal kv blocks"},
    }}),
]  # fmt: skip
EnvironmentField = Annotated[Environment, _strict_dataclass(Environment)]
