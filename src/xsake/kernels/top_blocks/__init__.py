"""Scores of blocks of keys by a small indexer, and the best blocks of every query."""

from xsake.kernels.top_blocks.api import OP, top_blocks

__all__ = ["OP", "top_blocks"]
