"""Attention functions that can be passed to a decoder."""

import dataclasses
from typing import ClassVar

from xsake.attention import BlockSparseAttention
from xsake.attention.layer_call import LayerCall
from xsake.errors import ArgumentError
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True)
class DenseAttention:
    """Dense attention with the model's mask.

    Args:
        operator: block sizes, implementation, mesh.
    """

    is_chunkable: ClassVar[bool] = True
    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: LayerCall):
        return call.apply(self.operator, q, k, v)


@dataclasses.dataclass(frozen=True)
class MaskedAttention:
    """Attention with an additional mask, the same in every layer.

    Args:
        mask: combined with the model's mask; `PerHead` sets one mask per query head.
        operator: block sizes, implementation, mesh.
    """

    is_chunkable: ClassVar[bool] = True
    mask: AbstractMask
    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: LayerCall):
        combined = dataclasses.replace(call, mask=call.mask & self.mask)
        return combined.apply(self.operator, q, k, v)


@dataclasses.dataclass(frozen=True)
class LayoutAttention:
    """Attention to the blocks of a layout, combined with the model's mask.

    A layout has fixed sequence lengths; calls must have exactly these lengths.

    Args:
        layouts: one layout for all layers, or one per layer.
        operator: implementation, mesh.
    """

    layouts: BlockLayout | tuple[BlockLayout, ...]
    operator: BlockSparseAttention = BlockSparseAttention()

    @property
    def needs_layer_number(self) -> bool:
        """Whether layers have different layouts, so that they cannot be scanned."""
        return isinstance(self.layouts, tuple)

    def __call__(self, q, k, v, call: LayerCall):
        return call.apply(self.operator, q, k, v, self._layer_layout(call.layer))

    def _layer_layout(self, layer) -> BlockLayout:
        if isinstance(self.layouts, BlockLayout):
            return self.layouts
        assert isinstance(layer, int), "layers are unrolled for per-layer layouts"
        if layer >= len(self.layouts):
            raise ArgumentError(
                "layer-layouts",
                "the model has more layers than there are layouts",
                got=f"{len(self.layouts)} layouts, layer {layer}",
                expected="one layout, or one per layer",
                fix="pass one layout for all layers, or build the missing ones",
            )
        return self.layouts[layer]
