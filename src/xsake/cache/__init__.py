"""Paged KV cache: pages of a pool as arrays, and tables of pages for sequences that share them."""

from xsake.cache.allocator import Append, PageAllocator
from xsake.cache.pages import LayerPages, PagedKV
from xsake.cache.rpa import from_rpa, to_rpa

__all__ = ["Append", "LayerPages", "PageAllocator", "PagedKV", "from_rpa", "to_rpa"]
