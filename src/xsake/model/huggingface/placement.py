"""Map the parameters of a decoder to the tensors of a family."""

import dataclasses
from typing import Any

from flax import nnx

from xsake.errors import CheckpointError
from xsake.model.config import DecoderConfig
from xsake.model.decoder import Decoder
from xsake.model.huggingface.families import ModelFamily, Prefixes
from xsake.model.huggingface.storage import TensorLayout


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """Parameter of the decoder and its layout in the file, with one tensor per layer."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: TensorLayout

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter stacks all layers in one array."""
        return self.names[0] == "layer"

    def tensors(self, prefixes: Prefixes) -> list[str]:
        """Return the names of its tensors by layer."""
        names_by_part = {"body": prefixes.body, "head": prefixes.head}
        name = self.layout.spec.name
        count = self.shape[0] if self.is_stacked else 1
        return [name.format(**names_by_part, layer=layer) for layer in range(count)]


def abstract_decoder(config: DecoderConfig, compute_dtype, param_dtype) -> Decoder:
    """Return a decoder with abstract parameters."""
    return nnx.eval_shape(
        lambda: Decoder(
            config, rngs=nnx.Rngs(0), compute_dtype=compute_dtype, param_dtype=param_dtype
        )
    )


def map_params(family: ModelFamily, state: Any) -> list[ParamMapping]:
    """Return the mapping of every parameter to the tensors of the family."""
    rows = {row.parameter: row for row in family.rows}
    mappings = []
    for path, variable in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        axes, shape = tuple(variable.get_metadata("out_sharding")), variable.get_value().shape
        skip = 1 if axes[0] == "layer" else 0
        if name not in rows:
            raise CheckpointError(
                f"checkpoints of the family {family.name!r} do not support a parameter",
                got=name,
                expected="one of " + ", ".join(rows),
                fix="export the model with the family it was loaded from",
            )
        layout = rows[name].layout(axes[skip:], shape[skip:])
        mappings.append(ParamMapping(name, axes, tuple(shape), layout))
    order = {row.parameter: number for number, row in enumerate(family.rows)}
    return sorted(mappings, key=lambda mapping: order[mapping.path])


def get_variable(state: Any, path: str) -> Any:
    """Return the variable at a dotted path."""
    for part in path.split("."):
        state = state[part]
    return state
