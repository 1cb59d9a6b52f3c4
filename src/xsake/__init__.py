"""XSAKE: block-sparse attention for JAX.

    mask = xsake.masks.Causal() & xsake.masks.Window(left=1023, right=0)  # which pairs are allowed
    layout = xsake.BlockLayout.from_mask(mask, q_tokens=8192)  # which blocks to compute
    out = xsake.attention(q, k, v, layout=layout)  # [B, T, H, D]
    print(xsake.explain(q, k, v, layout=layout))  # kernel, blocks and cost of the call

masks -> layout -> kernels -> attention: data flows right, imports go left.
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
    dot_product_attention,
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
    "dot_product_attention",
    "explain",
    "masks",
    "native_sparse_attention",
]
