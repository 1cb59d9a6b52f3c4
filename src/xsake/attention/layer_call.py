"""What a model passes to the attention function of a layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int

from xsake.attention.operator import BlockSparseAttention
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
    q_positions: Int[Array, "Bq Tq"] | None = None  # None: the token index
    kv_positions: Int[Array, "Bk Tk"] | None = None
    segment_ids: Int[Array, "B T"] | None = None  # of both queries and keys
    native: Any = None  # the layer's native sparse attention
    pages: Any = None  # those that hold k and v, in a step that extends a paged cache

    def apply(
        self,
        operator: BlockSparseAttention,
        q: Float[Array, "B Tq Hq D"],
        k: Any,
        v: Any,
        layout: BlockLayout | None = None,
    ) -> Float[Array, "B Tq Hq Dv"]:
        """Compute the attention with `operator`, or the layer's native sparse attention."""
        if self.native is not None:
            if layout is not None or self.mask != Causal():
                raise native_sparse_error("attention by a mask, a layout or a plan")
            return self.native(q, k, v, self, operator.mesh)
        if self.pages is not None and layout is None and self.pages.is_served_by(operator, q):
            return self.pages.attend(
                q, mask=self.mask, scale=self.scale, softcap=self.softcap,
                implementation=operator.implementation,
            )  # fmt: skip
        return dataclasses.replace(operator, scale=self.scale)(
            q, k, v,
            mask=self.mask,
            layout=layout,
            softcap=self.softcap,
            q_positions=self.q_positions,
            kv_positions=self.kv_positions,
            q_segment_ids=self.segment_ids,
        )  # fmt: skip


AttentionFn = Callable[
    [Float[Array, "B Tq Hq D"], Float[Array, "B Tk Hk D"], Float[Array, "B Tk Hk D"], LayerCall],
    Float[Array, "B Tq Hq D"],
]
"""Computes a layer's attention. If it has a true attribute `needs_layer_number`, layers are
unrolled and `LayerCall.layer` is a Python int; otherwise layers are scanned. With a true attribute
`is_chunkable` it serves chunks of a prompt, whose keys are in pages; its method `init_prefill`, if
any, makes the state that is kept from chunk to chunk."""


def native_sparse_error(got: str) -> ArgumentError:
    """Error for another attention function in a layer with native sparse attention."""
    return ArgumentError(
        "native-sparse-attention-replaced",
        "a model with native sparse attention selects its blocks itself",
        got=got,
        expected="DenseAttention()",
        fix="omit `attend`",
    )
