"""Native Sparse Attention (arXiv 2502.11089): compressed, selected and window branches."""

from xsake.nsa.api import attention, selected_attention
from xsake.nsa.config import KV, Compress, Config, Gates

__all__ = ["KV", "Compress", "Config", "Gates", "attention", "selected_attention"]
