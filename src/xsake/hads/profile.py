"""Calibration profile: the measurements of every head, saved as JSON."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from jaxtyping import Float, Int
from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from xsake import _json
from xsake._provenance import Environment
from xsake._schema import Frozen, JsonDocument, Positive, Text
from xsake.hads.budget import MAX_BLOCKS, ForcedBlocks
from xsake.layout.grid import count_blocks

MAX_HEADS = 2**14  # of all layers
MAX_WEIGHTS = 256  # of a selector, for one head
CURVE_TOLERANCE = 1e-5  # allowed violation of curve >= 0 and monotonicity by rounding


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


class CalibratedModel(Frozen):
    """Identity and sizes of the calibrated model."""

    name: Text
    digest: Text = Field(description="of its files")
    layers: Annotated[Positive, Field(le=512)]
    q_heads: Annotated[Positive, Field(le=512)] = Field(description="of a layer")
    kv_heads: Positive
    head_dim: Annotated[Positive, Field(le=4096)]

    @model_validator(mode="after")
    def _validate(self) -> "CalibratedModel":
        if self.q_heads % self.kv_heads or self.layers * self.q_heads > MAX_HEADS:
            raise ValueError(
                f"{self.q_heads=} is not a multiple of {self.kv_heads=}, or there are more than "
                f"{MAX_HEADS} heads"
            )
        return self

    @property
    def heads(self) -> int:
        """Query heads of all layers."""
        return self.layers * self.q_heads


class DocumentRecord(Frozen):
    """Name and digest of a calibration document."""

    name: Text
    sha256: Text = Field(description="of its tokens")
    tokens: Positive


class Profile(JsonDocument):
    """Measurements per layer and head, means over all rows and documents.

    There are `n` query blocks and `n` kv blocks. The mass of a block is its share of a query's
    attention, mean over the queries of a row.
    """

    file_type: ClassVar[str] = "a calibration profile"
    max_bytes: ClassVar[int] = 2**26
    max_containers: ClassVar[int] = 2**18

    schema_version: Literal[1] = 1
    model: CalibratedModel
    documents: tuple[DocumentRecord, ...]
    context: Positive = Field(description="tokens of each document")
    block: Positive = Field(description="tokens of a query block and of a kv block")
    forced: ForcedField = Field(alias="always", description="blocks that every head computes")
    seed: Annotated[int, Field(strict=True)]
    environment: EnvironmentField
    components: Components = Field(
        description="by layer and kv head: components of queries and keys, by descending"
        " contribution to scores"
    )
    entropy: PerHead = Field(description="of the attention over tokens, nats")
    block_entropy: PerHead = Field(description="of the attention over blocks, nats")
    need90: PerHead = Field(description="blocks for 90 % of a row's mass / visible blocks")
    outside: PerHead = Field(description="mass outside the forced blocks")
    offset_mass: PerHeadRow = Field(
        description="[offset 0..n-1]: mass `offset` blocks before the diagonal, mean over rows"
    )
    column_mass: PerHeadRow = Field(description="[column 0..n-1]: its mass, mean over later rows")
    curves: dict[Text, PerHeadRow] = Field(
        description="by selector, [k 0..n]: mean of -log(kept mass) over all queries with"
        " max(forced, k) blocks per row, the forced ones and the selector's best"
    )
    effects: dict[Text, PerHeadRow] = Field(
        default_factory=dict,
        description="by selector, [k 0..n]: nats per token of KL(dense || sparse) of the model's"
        " predictions caused by the head alone, to second order; empty if not measured",
    )
    selector_weights: dict[Text, PerHeadRow] = Field(description="correction weights by selector")

    @model_validator(mode="after")
    def _validate(self) -> "Profile":
        if self.n > MAX_BLOCKS:
            raise ValueError(f"{self.n} blocks exceed {MAX_BLOCKS}")
        model, curves, effects = self.model, self.curves.items(), self.effects.items()
        heads = (model.layers, model.q_heads)
        shapes = dict.fromkeys(("entropy", "block_entropy", "need90", "outside"), heads)
        shapes |= dict.fromkeys(("offset_mass", "column_mass"), (*heads, self.n))
        shapes["components"] = (model.layers, model.kv_heads, model.head_dim)
        arrays = [(name, getattr(self, name), shape) for name, shape in shapes.items()]
        levels = (*heads, self.n + 1)
        arrays += [(f"curve {name!r}", curve, levels) for name, curve in curves]
        arrays += [(f"effect {name!r}", effect, levels) for name, effect in effects]
        for name, weights in self.selector_weights.items():
            limit = min(weights.shape[-1], MAX_WEIGHTS) if weights.ndim else 0
            arrays.append((f"weights {name!r}", weights, (*heads, limit)))
        for name, array, shape in arrays:
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
        for name in ("need90", "outside", "offset_mass", "column_mass"):
            if getattr(self, name).min() < 0 or getattr(self, name).max() > 1:
                raise ValueError(f"{name} is not in 0..1")
        for name, curve in curves:
            if curve.min() < -CURVE_TOLERANCE or np.diff(curve).max() > CURVE_TOLERANCE:
                raise ValueError(f"the curve {name!r} is negative or increasing")
        for name, effect in effects:
            if effect.min() < 0:
                raise ValueError(f"the effect {name!r} is negative")
        if (np.sort(self.components) != np.arange(model.head_dim)).any():
            raise ValueError("components are not a permutation")
        return self

    @property
    def n(self) -> int:
        """Number of query blocks, equal to that of kv blocks."""
        return count_blocks(self.context, self.block)

    @property
    def digest(self) -> str:
        """SHA-256 of the measurements, independent of machine and time."""
        content = self.model_dump(mode="json", exclude={"environment"})
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Profile):
            return NotImplemented
        return (self.digest, self.environment) == (other.digest, other.environment)

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> str:
        """Return the JSON text of the file, one head per line for long arrays."""
        depths = {"documents": 1, "curves": 3, "selector_weights": 3}
        depths |= dict.fromkeys(("offset_mass", "column_mass", "components"), 2)
        depths |= dict.fromkeys(("entropy", "block_entropy", "need90", "outside"), 1)
        return _json.dumps(self.model_dump(mode="json"), depths)
