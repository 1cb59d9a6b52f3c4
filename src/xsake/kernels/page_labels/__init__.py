"""Scores of the pages of a KV cache from labels of 4 bits, for the selection of pages."""

from xsake.kernels.page_labels.api import OP, label_scores

__all__ = ["OP", "label_scores"]
