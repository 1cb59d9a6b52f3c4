"""Paged KV cache: pages of a pool as arrays, and tables of pages for sequences that share them."""

from xsake.cache.allocator import Append, PageAllocator
from xsake.cache.int8_keys import Int8Keys, PageBounds
from xsake.cache.pages import LayerPages, PagedKV, PrefillState
from xsake.cache.rpa import from_rpa, to_rpa
from xsake.cache.selectors import ForcedPages, Labels, Oracle, PageSelector, Quest

__all__ = [
    "Append", "ForcedPages", "Int8Keys", "Labels", "LayerPages", "Oracle", "PageAllocator",
    "PageBounds", "PageSelector", "PagedKV", "PrefillState", "Quest", "from_rpa", "to_rpa",
]  # fmt: skip
