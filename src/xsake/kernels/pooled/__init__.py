"""Pooled attention: queries look at summaries of key blocks, and choose blocks by what they see."""

from xsake.kernels.pooled.op import BACKENDS, pooled

__all__ = ["BACKENDS", "pooled"]
