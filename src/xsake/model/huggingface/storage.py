"""Layout of a decoder's parameters in the tensors of a file: names, axis order, parts."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """Mapping of a tensor to a parameter.

    Args:
        name: of the tensor; {layer} is the layer number, {body} and {head} the file's prefixes.
        parameter: path in the decoder.
        axes: logical axes of the tensor, outermost first; "a*b" is a merged axis, b fastest.
        part: (index, count) of a split of the tensor's last axis.
    """

    name: str
    parameter: str
    axes: str
    part: tuple[int, int] = (0, 1)

    def layout(self, names: Sequence[str], shape: Sequence[int]) -> "TensorLayout":
        """Return the layout of one layer of a parameter with these logical axes and shape."""
        groups = [group.split("*") for group in self.axes.replace(" ", "").split(",")]
        order = tuple(names.index(axis) for group in groups for axis in group)
        assert sorted(order) == list(range(len(names))), (self, names)
        sizes = tuple(math.prod(shape[names.index(axis)] for axis in group) for group in groups)
        return TensorLayout(self, tuple(shape), order, sizes)


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """Conversion between one layer of a parameter and its tensor."""

    spec: TensorSpec
    param_shape: tuple[int, ...]
    order: tuple[int, ...]  # the parameter's axes in the tensor's order
    part_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the file."""
        return (*self.part_shape[:-1], self.part_shape[-1] * self.spec.part[1])

    @property
    def how(self) -> str:
        """Conversion of the tensor: split, transposed, reshaped or as is."""
        if self.spec.part[1] > 1:
            return "split"
        if self.order != tuple(range(len(self.order))):
            return "transposed"
        return "as is" if self.part_shape == self.param_shape else "reshaped"

    def to_decoder(self, tensor: np.ndarray) -> np.ndarray:
        """Convert a tensor of the file to the parameter."""
        index, _ = self.spec.part
        width = self.part_shape[-1]
        part = tensor[..., index * width : (index + 1) * width]
        reshaped = part.reshape([self.param_shape[axis] for axis in self.order])
        return reshaped.transpose(np.argsort(self.order))

    def to_file(self, parameter: np.ndarray) -> np.ndarray:
        """Convert the parameter to its part of the tensor."""
        return np.ascontiguousarray(parameter.transpose(self.order).reshape(self.part_shape))
