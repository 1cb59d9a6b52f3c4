"""Public attention API on [B, T, H, D] arrays: attention, operators, explain."""

from xsake.attention.block_sparse import attention
from xsake.attention.dot_product import dot_product_attention
from xsake.attention.explain import Explanation, explain
from xsake.attention.operator import BlockSparseAttention

__all__ = ["BlockSparseAttention", "Explanation", "attention", "dot_product_attention", "explain"]
