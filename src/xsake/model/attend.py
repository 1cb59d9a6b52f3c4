"""Attention as a value that a decoder is given: who looks at what in each layer, and how."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from xsake.attention import BlockSparseAttention
from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask, Causal


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """What a layer tells its attention beside queries, keys and values."""

    layer: int | Array  # a Python number only if the attention `needs_layer_number`
    mask: AbstractMask  # the model's own rule; a pair it excludes must stay excluded
    scale: float
    softcap: float | None = None
    q_positions: Any = None  # [B, Tq]; None with kv_positions None: token i is at position i
    kv_positions: Any = None
    segment_ids: Any = None  # [B, T] of queries and keys alike
    native: Any = None  # gates and summaries of a layer of native sparse attention

    def through(self, operator: BlockSparseAttention, q, k, v, layout: BlockLayout | None = None):
        """This call, computed by a configured `xsake.attention`, or as its layer was made to."""
        if self.native is not None:
            self._refuse(layout)
            return self.native(q, k, v, self, operator.mesh)
        return dataclasses.replace(operator, scale=self.scale)(
            q, k, v,
            mask=self.mask,
            layout=layout,
            softcap=self.softcap,
            q_positions=self.q_positions,
            kv_positions=self.kv_positions,
            q_segment_ids=self.segment_ids,
        ).out  # fmt: skip

    def _refuse(self, layout: BlockLayout | None) -> None:
        if layout is not None or self.mask != Causal():
            raise _chooses_itself("attention by a mask, a layout or a plan")


Attend = Callable[
    [Float[Array, "B Tq Hq D"], Float[Array, "B Tk Hk D"], Float[Array, "B Tk Hk D"], LayerCall],
    Float[Array, "B Tq Hq D"],
]
"""Anything that computes a layer's attention. If it has a true attribute `needs_layer_number`,
layers are unrolled and `LayerCall.layer` is a Python number; otherwise they are scanned."""


@dataclasses.dataclass(frozen=True)
class Dense:
    """Everything that the model's own rule lets a query see.

    Args:
        operator: block sizes, implementation, mesh.
    """

    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: LayerCall):
        return call.through(self.operator, q, k, v)


def require_dense(attend: Attend) -> None:
    """Raise unless a model with native sparse attention may do what it was made for."""
    if not isinstance(attend, Dense):
        raise _chooses_itself(f"attend={type(attend).__name__}(...)")


def _chooses_itself(got: str) -> ArgumentError:
    return ArgumentError(
        "a model with native sparse attention chooses its blocks itself",
        got=got,
        expected="Dense(), which lets the model do what it was made for",
        fix="pass no `attend`",
    )


@dataclasses.dataclass(frozen=True)
class Masked:
    """A mask on top of the model's own rule, the same in every layer.

    Args:
        mask: who may see whom; `PerHead` gives query heads rules of their own.
        operator: block sizes, implementation, mesh.
    """

    mask: AbstractMask
    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: LayerCall):
        joint = dataclasses.replace(call, mask=call.mask & self.mask)
        return joint.through(self.operator, q, k, v)


@dataclasses.dataclass(frozen=True)
class Listed:
    """Only listed blocks: one layout for all layers, or one for each; the model's rule holds too.

    A layout knows the lengths it was made for, so it serves calls of exactly these lengths.

    Args:
        layouts: one layout, or as many as the model has layers.
        operator: implementation, mesh.
    """

    layouts: BlockLayout | tuple[BlockLayout, ...]
    operator: BlockSparseAttention = BlockSparseAttention()

    @property
    def needs_layer_number(self) -> bool:
        """Layouts of their own are different programs, so layers cannot be scanned."""
        return isinstance(self.layouts, tuple)

    def __call__(self, q, k, v, call: LayerCall):
        return call.through(self.operator, q, k, v, self._of_layer(call.layer))

    def _of_layer(self, layer) -> BlockLayout:
        if isinstance(self.layouts, BlockLayout):
            return self.layouts
        assert isinstance(layer, int), "layers are unrolled for such attention"
        if layer >= len(self.layouts):
            raise ArgumentError(
                "the model has more layers than there are layouts",
                got=f"{len(self.layouts)} layouts, layer {layer}",
                expected="one layout, or one for every layer",
                fix="give one layout for all layers, or build the missing ones",
            )
        return self.layouts[layer]
