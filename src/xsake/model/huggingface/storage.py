"""How a decoder's parameter lies in the tensors of a file: names, order of axes, parts."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a family's table.

    Args:
        name: the tensor's; {layer} is a layer's number, {body} and {head} the file's prefixes.
        parameter: path in the decoder.
        axes: of the tensor, outermost first, in the decoder's logical names; "a*b" is one axis
            that runs over a and, faster, over b.
        part: (which, of how many) of the tensor's last axis, if several parameters share it.
    """

    name: str
    parameter: str
    axes: str
    part: tuple[int, int] = (0, 1)

    def stored(self, own: Sequence[str], shape: Sequence[int]) -> "Stored":
        """How a parameter of these logical axes and this shape, one layer's, is stored."""
        groups = [group.split("*") for group in self.axes.replace(" ", "").split(",")]
        order = tuple(own.index(axis) for group in groups for axis in group)
        assert sorted(order) == list(range(len(own))), (self, own)
        sizes = tuple(math.prod(shape[own.index(axis)] for axis in group) for group in groups)
        return Stored(self, tuple(shape), order, sizes)


@dataclasses.dataclass(frozen=True)
class Stored:
    """A row that knows its parameter's shape: converts one layer's array both ways."""

    row: Row
    own_shape: tuple[int, ...]
    order: tuple[int, ...]  # the parameter's axes in the tensor's order
    part_shape: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor in the file."""
        return (*self.part_shape[:-1], self.part_shape[-1] * self.row.part[1])

    @property
    def how(self) -> str:
        """What happens to the tensor on its way, in a word."""
        if self.row.part[1] > 1:
            return "split"
        if self.order != tuple(range(len(self.order))):
            return "transposed"
        return "as is" if self.part_shape == self.own_shape else "reshaped"

    def to_decoder(self, tensor: np.ndarray) -> np.ndarray:
        """The parameter in the tensor of a file."""
        which, _ = self.row.part
        width = self.part_shape[-1]
        part = tensor[..., which * width : (which + 1) * width]
        apart = part.reshape([self.own_shape[axis] for axis in self.order])
        return apart.transpose(np.argsort(self.order))

    def to_file(self, parameter: np.ndarray) -> np.ndarray:
        """The part of a file's tensor that is this parameter."""
        return np.ascontiguousarray(parameter.transpose(self.order).reshape(self.part_shape))
