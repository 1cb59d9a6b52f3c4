"""Compressed attention: queries attend to summaries of keys, whose scores select blocks."""

from xsake.kernels.compressed.api import compressed_attention

__all__ = ["compressed_attention"]
