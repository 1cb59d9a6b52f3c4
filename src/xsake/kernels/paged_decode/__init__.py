"""Attention of few queries over the pages of a KV cache."""

from xsake.kernels.paged_decode.api import OP, paged_attention

__all__ = ["OP", "paged_attention"]
