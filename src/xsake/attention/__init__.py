"""Public attention API on [B, T, H, D] arrays: attention, operators, explain."""

from xsake.attention.block_sparse import attention
from xsake.attention.explain import Explanation, explain
from xsake.attention.operator import AttentionOutput, BlockSparseAttention

__all__ = [
    "AttentionOutput",
    "BlockSparseAttention",
    "Explanation",
    "attention",
    "explain",
]
