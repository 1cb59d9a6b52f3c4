"""XSAKE: sparse attention for JAX that computes only the blocks it was asked to.

    mask = xsake.masks.Causal() & xsake.masks.Window(left=1023, right=0)  # who may see whom
    layout = xsake.BlockLayout.from_mask(mask, q_tokens=8192)  # which blocks that is
    out = xsake.attention(q, k, v, layout=layout)  # compute those, [B, T, H, D]
    print(xsake.explain(q, k, v, layout=layout))  # what was really computed

masks -> layout -> kernels -> attention: data flows to the right, imports only to the left.
"""

from xsake import masks
from xsake.attention import (
    AttentionOutput,
    Blocks,
    BlockSparseAttention,
    Branches,
    Explanation,
    Gates,
    apply_native_sparse_attention,
    attention,
    explain,
    native_sparse_attention,
)
from xsake.errors import XsakeError
from xsake.layout import BlockLayout

__version__ = "0.1.1"

__all__ = [
    "AttentionOutput",
    "BlockLayout",
    "BlockSparseAttention",
    "Blocks",
    "Branches",
    "Explanation",
    "Gates",
    "XsakeError",
    "apply_native_sparse_attention",
    "attention",
    "explain",
    "masks",
    "native_sparse_attention",
]
