"""Attention functions that can be passed to a decoder."""

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
    """Arguments of a layer's attention other than q, k and v."""

    layer: int | Array  # a Python int only if the attention function has `needs_layer_number`
    mask: AbstractMask  # the model's mask; excluded pairs must stay excluded
    scale: float
    softcap: float | None = None
    q_positions: Any = None  # [B, Tq]; None with kv_positions None: token i is at position i
    kv_positions: Any = None
    segment_ids: Any = None  # [B, T] of both queries and keys
    native: Any = None  # gates and compressors of native sparse attention

    def apply(self, operator: BlockSparseAttention, q, k, v, layout: BlockLayout | None = None):
        """Compute the attention with `operator`, or the layer's native sparse attention."""
        if self.native is not None:
            self._check_native(layout)
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

    def _check_native(self, layout: BlockLayout | None) -> None:
        if layout is not None or self.mask != Causal():
            raise _native_sparse_error("attention by a mask, a layout or a plan")


AttentionFn = Callable[
    [Float[Array, "B Tq Hq D"], Float[Array, "B Tk Hk D"], Float[Array, "B Tk Hk D"], LayerCall],
    Float[Array, "B Tq Hq D"],
]
"""Computes a layer's attention. If it has a true attribute `needs_layer_number`, layers are
unrolled and `LayerCall.layer` is a Python int; otherwise layers are scanned."""


@dataclasses.dataclass(frozen=True)
class DenseAttention:
    """Dense attention with the model's mask.

    Args:
        operator: block sizes, implementation, mesh.
    """

    operator: BlockSparseAttention = BlockSparseAttention()

    def __call__(self, q, k, v, call: LayerCall):
        return call.apply(self.operator, q, k, v)


def check_dense(attend: AttentionFn) -> None:
    """Raise unless the attention function allows native sparse attention."""
    if not isinstance(attend, DenseAttention):
        raise _native_sparse_error(f"attend={type(attend).__name__}(...)")


def _native_sparse_error(got: str) -> ArgumentError:
    return ArgumentError(
        "a model with native sparse attention selects its blocks itself",
        got=got,
        expected="DenseAttention()",
        fix="omit `attend`",
    )


@dataclasses.dataclass(frozen=True)
class MaskedAttention:
    """Attention with an additional mask, the same in every layer.

    Args:
        mask: combined with the model's mask; `PerHead` sets one mask per query head.
        operator: block sizes, implementation, mesh.
    """

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
                "the model has more layers than there are layouts",
                got=f"{len(self.layouts)} layouts, layer {layer}",
                expected="one layout, or one per layer",
                fix="pass one layout for all layers, or build the missing ones",
            )
        return self.layouts[layer]
