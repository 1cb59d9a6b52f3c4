"""Selected attention: every query has its own list of kv blocks, shared by the heads of a group."""

from xsake.kernels.selected.op import BACKENDS, selected

__all__ = ["BACKENDS", "selected"]
