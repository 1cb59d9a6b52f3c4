"""Selected attention: every query has its own list of kv blocks, shared by the heads of a group."""

from xsake.kernels.selected.api import selected_attention

__all__ = ["selected_attention"]
