"""XSAKE: block-sparse attention for JAX.

    mask = xsake.masks.Causal() & xsake.masks.Window(left=1023, right=0)  # which pairs are allowed
    layout = xsake.BlockLayout.from_mask(mask, q_tokens=8192)  # which blocks to compute
    out = xsake.attention(q, k, v, layout=layout)  # [B, T, H, D]
    print(xsake.explain(q, k, v, layout=layout))  # kernel, blocks and cost of the call

masks -> layout -> kernels -> attention: data flows right, imports go left.
"""

import importlib
from typing import TYPE_CHECKING, Any

from xsake import masks
from xsake.attention import (
    BlockSparseAttention,
    Explanation,
    attention,
    dot_product_attention,
    explain,
)
from xsake.errors import XsakeError
from xsake.layout import BlockLayout

if TYPE_CHECKING:
    from xsake import cache, distributed, hads, indexed, nsa
    from xsake.nsa.aliases import (
        Blocks,
        Branches,
        Gates,
        apply_native_sparse_attention,
        native_sparse_attention,
    )

__version__ = "0.1.1"

__all__ = [
    "BlockLayout",
    "BlockSparseAttention",
    "Blocks",
    "Branches",
    "Explanation",
    "Gates",
    "XsakeError",
    "apply_native_sparse_attention",
    "attention",
    "cache",
    "distributed",
    "dot_product_attention",
    "explain",
    "hads",
    "indexed",
    "masks",
    "native_sparse_attention",
    "nsa",
]

_PACKAGES = ("cache", "distributed", "hads", "indexed", "nsa")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # static checkers know the names above, and reject others

    def __getattr__(name: str) -> Any:
        """Import packages, and the names that stand for contents of `xsake.nsa`, on first use."""
        if name in _PACKAGES:
            return importlib.import_module(f"xsake.{name}")
        if name in __all__:
            return getattr(importlib.import_module("xsake.nsa.aliases"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
