"""Map the parameters of a decoder to the tensors of a family: names, axis order, parts."""

import dataclasses
import math
from functools import cached_property
from typing import Any

import numpy as np
from flax import nnx

from xsake.errors import CheckpointError
from xsake.model.huggingface.families import ModelFamily, Prefixes, TensorSpec


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """Parameter of the decoder and its tensors in the file, one per layer."""

    spec: TensorSpec  # of the tensor
    axes: tuple[str, ...]  # logical axes of the parameter
    shape: tuple[int, ...]  # of the parameter

    @property
    def path(self) -> str:
        """Dotted path of the parameter."""
        return self.spec.parameter

    @property
    def is_stacked(self) -> bool:
        """Whether the parameter stacks all layers in one array."""
        return self.axes[0] == "layer"

    def tensors(self, prefixes: Prefixes) -> list[str]:
        """Return the names of its tensors by layer."""
        layers = range(self.shape[0] if self.is_stacked else 1)
        return [self.spec.name.format(**prefixes._asdict(), layer=layer) for layer in layers]

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Axes of one layer of the parameter, by axis of the tensor."""
        axes = self.axes[self.is_stacked :]
        groups = [group.split("*") for group in self.spec.axes.replace(" ", "").split(",")]
        return [[axes.index(axis) for axis in group] for group in groups]

    @cached_property
    def _order(self) -> list[int]:
        order = sum(self._groups, [])
        assert sorted(order) == list(range(len(self.axes) - self.is_stacked)), self
        return order

    @cached_property
    def _layer_shape(self) -> tuple[int, ...]:
        return self.shape[self.is_stacked :]

    @cached_property
    def _part_shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self._layer_shape[axis] for axis in group) for group in self._groups)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return (*self._part_shape[:-1], self._part_shape[-1] * self.spec.part[1])

    @property
    def how(self) -> str:
        """Conversion of the tensor: split, transposed, reshaped or as is."""
        if self.spec.part[1] > 1:
            return "split"
        if self._order != sorted(self._order):
            return "transposed"
        return "as is" if self._part_shape == self._layer_shape else "reshaped"

    def to_decoder(self, tensor: np.ndarray) -> np.ndarray:
        """Convert a tensor of the file to one layer of the parameter."""
        index, count = self.spec.part
        part = np.split(tensor, count, axis=-1)[index]
        reshaped = part.reshape([self._layer_shape[axis] for axis in self._order])
        return reshaped.transpose(np.argsort(self._order))

    def to_file(self, parameter: np.ndarray) -> np.ndarray:
        """Convert one layer of the parameter to its part of the tensor."""
        return np.ascontiguousarray(parameter.transpose(self._order).reshape(self._part_shape))


def map_params(family: ModelFamily, state: Any) -> list[ParamMapping]:
    """Return the mapping of every parameter to the tensors of the family, in the family's order."""
    params = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    specs = {spec.parameter: spec for spec in family.tensors}
    for name in params.keys() - specs.keys():
        raise CheckpointError(
            "family-parameter",
            f"checkpoints of the family {family.name!r} do not support a parameter",
            got=name,
            expected="one of " + ", ".join(specs),
            fix="export the model with the family it was loaded from",
        )  # fmt: skip
    return [
        ParamMapping(
            spec,
            tuple(params[name].get_metadata("out_sharding")),
            tuple(params[name].get_value().shape),
        )
        for name, spec in specs.items()
        if name in params
    ]


def get_variable(state: Any, path: str) -> Any:
    """Return the variable at a dotted path."""
    for part in path.split("."):
        state = state[part]
    return state
