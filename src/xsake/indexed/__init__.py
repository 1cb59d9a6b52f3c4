"""Attention to blocks that a trained indexer selects: MSA, MoBA and DSA by blocks."""

from xsake.indexed.api import attention, moba_index, select_blocks
from xsake.indexed.config import Config
from xsake.indexed.distillation import distillation_loss

__all__ = ["Config", "attention", "distillation_loss", "moba_index", "select_blocks"]
