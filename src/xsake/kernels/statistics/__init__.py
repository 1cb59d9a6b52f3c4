"""Attention statistics: where each query's attention goes, exactly and without an N^2 array."""

from xsake.kernels.statistics.api import block_statistics
from xsake.kernels.statistics.types import Statistics

__all__ = ["Statistics", "block_statistics"]
