"""What calibration measured of every head, as one file; decides nothing about blocks itself."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from xsake import _json
from xsake._schema import Frozen, Positive, Text, validate
from xsake.hads.budget import MOST_BLOCKS
from xsake.hads.fields import Always, Components, Machine, PerHead, PerHeadRow
from xsake.layout.grid import blocks_of

MOST_BYTES, MOST_PARTS = 2**26, 2**18
MOST_HEADS = 2**14  # of all layers
MOST_WEIGHTS = 256  # of a selector, for one head
NOISE = 1e-5  # by which a measured curve may miss what its definition promises


class CalibratedModel(Frozen):
    """Which model it was."""

    name: Text
    digest: Text = Field(description="of its files")
    layers: Annotated[Positive, Field(le=512)]
    q_heads: Annotated[Positive, Field(le=512)] = Field(description="of a layer")
    kv_heads: Positive
    head_dim: Annotated[Positive, Field(le=4096)]

    @model_validator(mode="after")
    def _possible(self) -> "CalibratedModel":
        if self.q_heads % self.kv_heads or self.layers * self.q_heads > MOST_HEADS:
            raise ValueError(
                f"{self.q_heads=} is no multiple of {self.kv_heads=}, or there are more than "
                f"{MOST_HEADS} heads"
            )
        return self

    @property
    def heads(self) -> int:
        """Query heads of all layers."""
        return self.layers * self.q_heads


class CalibrationDocument(Frozen):
    """A text that was read."""

    name: Text
    sha256: Text = Field(description="of its tokens")
    tokens: Positive


class Profile(Frozen):
    """What calibration measured: means over all rows and documents, per layer and head.

    There are `n` query blocks and as many kv blocks. A mass is the share of a query's attention
    that falls into a block, mean over the queries of a row.
    """

    schema_version: Literal[1] = 1
    model: CalibratedModel
    documents: tuple[CalibrationDocument, ...]
    context: Positive = Field(description="tokens that were read of each document")
    block: Positive = Field(description="tokens of a query block and of a kv block")
    always: Always = Field(description="blocks that every head computes")
    seed: Annotated[int, Field(strict=True)]
    environment: Machine
    components: Components = Field(
        description="by layer and kv head: those of queries and keys that move scores most first"
    )
    entropy: PerHead = Field(description="of a query's attention over tokens, nats")
    block_entropy: PerHead = Field(description="the same over blocks")
    need90: PerHead = Field(description="blocks for 90 % of a row's mass / visible blocks")
    outside: PerHead = Field(description="mass outside the always-on blocks")
    offset_mass: PerHeadRow = Field(
        description="[offset 0..n-1]: mass `offset` blocks before the diagonal, over rows that far"
    )
    column_mass: PerHeadRow = Field(description="[column 0..n-1]: its mass, over rows below it")
    curves: dict[Text, PerHeadRow] = Field(
        description="by selector, [k 0..n]: mean of -log(kept mass) over all queries when every row"
        " keeps its always-on blocks and the selector's best, max(always-on, k) in all"
    )
    effects: dict[Text, PerHeadRow] = Field(
        default_factory=dict,
        description="by selector, [k 0..n]: nats per token of KL(dense || sparse) of the model's"
        " predictions that the head alone would cause, to second order; empty if not measured",
    )
    selector_weights: dict[Text, PerHeadRow] = Field(description="by selector, any number of each")

    @model_validator(mode="after")
    def _consistent(self) -> "Profile":
        if self.n > MOST_BLOCKS:
            raise ValueError(f"{self.n} blocks are more than {MOST_BLOCKS}")
        heads = (self.model.layers, self.model.q_heads)
        heads_of_keys = (self.model.layers, self.model.kv_heads)
        shares = {"need90": self.need90, "outside": self.outside}
        masses = {"offset_mass": self.offset_mass, "column_mass": self.column_mass}
        for name, array in {"entropy": self.entropy, "block_entropy": self.block_entropy}.items():
            _require_shape(name, array, heads)
        for name, array in (shares | masses).items():
            _require_shape(name, array, heads if name in shares else (*heads, self.n))
            if array.min() < 0 or array.max() > 1:
                raise ValueError(f"{name} is no share")
        for name, curve in self.curves.items():
            _require_shape(f"curve {name!r}", curve, (*heads, self.n + 1))
            if curve.min() < -NOISE or np.diff(curve).max() > NOISE:
                raise ValueError(f"the curve {name!r} is negative somewhere, or rises")
        for name, effect in self.effects.items():
            _require_shape(f"effect {name!r}", effect, (*heads, self.n + 1))
            if effect.min() < 0:
                raise ValueError(f"the effect {name!r} is negative somewhere")
        _require_shape("components", self.components, (*heads_of_keys, self.model.head_dim))
        if (np.sort(self.components) != np.arange(self.model.head_dim)).any():
            raise ValueError("components that are not each there once")
        for name, weights in self.selector_weights.items():
            _require_shape(
                f"weights {name!r}", weights, (*heads, min(weights.shape[-1], MOST_WEIGHTS))
            )
        return self

    @property
    def n(self) -> int:
        """Query blocks, and kv blocks."""
        return blocks_of(self.context, self.block)

    @property
    def digest(self) -> str:
        """Names what was measured, whatever machine measured it and when."""
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
        """The text of its file; one head per line where a head has many numbers."""
        opened = {"documents": 1, "curves": 3, "selector_weights": 3}
        opened |= dict.fromkeys(("offset_mass", "column_mass", "components"), 2)
        opened |= dict.fromkeys(("entropy", "block_entropy", "need90", "outside"), 1)
        return _json.dumps(self.model_dump(mode="json"), opened)

    @classmethod
    def from_json(cls, data: bytes) -> "Profile":
        """A profile from the bytes of its file, checked."""
        what = "a calibration profile"
        document = _json.loads(
            data, what=what, max_bytes=MOST_BYTES, max_containers=MOST_PARTS, max_values=MOST_BYTES
        )
        return validate(cls, document, what=what)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        _json.write(path, self.to_json(), max_bytes=MOST_BYTES)

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read the file, at most 64 MB."""
        return cls.from_json(_json.read(path, max_bytes=MOST_BYTES))


def _require_shape(name: str, array: np.ndarray, expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(f"{name} has the shape {array.shape}, not {expected}")
