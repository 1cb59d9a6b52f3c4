"""Every parameter of a decoder with its place in a family's files; it reads and writes none."""

import dataclasses
from typing import Any

from flax import nnx

from xsake.errors import CheckpointError
from xsake.model.config import DecoderConfig
from xsake.model.decoder import Decoder
from xsake.model.huggingface.families import Family, Prefixes
from xsake.model.huggingface.storage import Stored


@dataclasses.dataclass(frozen=True)
class Placed:
    """A parameter of the decoder, and how it is stored: every layer in a tensor of its own."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    stored: Stored

    @property
    def is_stacked(self) -> bool:
        """Whether the decoder keeps all layers in one array."""
        return self.names[0] == "layer"

    def tensors(self, prefixes: Prefixes) -> list[str]:
        """Names of its tensors, by layer."""
        said = {"body": prefixes.body, "head": prefixes.head}
        name = self.stored.row.name
        count = self.shape[0] if self.is_stacked else 1
        return [name.format(**said, layer=layer) for layer in range(count)]


def abstract_decoder(config: DecoderConfig, compute_dtype, param_dtype) -> Decoder:
    """A decoder whose parameters have shapes and no values."""
    return nnx.eval_shape(
        lambda: Decoder(
            config, rngs=nnx.Rngs(0), compute_dtype=compute_dtype, param_dtype=param_dtype
        )
    )


def placed(family: Family, state: Any) -> list[Placed]:
    """Every parameter of a decoder with its place in the family's files."""
    rows = {row.parameter: row for row in family.rows}
    found = []
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        axes, shape = tuple(variable.get_metadata("out_sharding")), variable.get_value().shape
        skip = 1 if axes[0] == "layer" else 0
        if name not in rows:
            raise CheckpointError(
                f"checkpoints of the family {family.name!r} have no place for a parameter",
                got=name,
                expected="one of " + ", ".join(rows),
                fix="export the model as the family it was loaded from",
            )
        stored = rows[name].stored(axes[skip:], shape[skip:])
        found.append(Placed(name, axes, tuple(shape), stored))
    order = {row.parameter: number for number, row in enumerate(family.rows)}
    return sorted(found, key=lambda place: order[place.path])


def variable(state: Any, path: str) -> Any:
    for part in path.split("."):
        state = state[part]
    return state
