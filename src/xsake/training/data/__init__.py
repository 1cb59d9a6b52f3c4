"""Data for training: texts become files of tokens, and those become batches in a fixed order."""

from xsake.training.data.building import Built, Progress, Settings, build
from xsake.training.data.index import Index, read_index
from xsake.training.data.loader import Batch, TokenLoader
from xsake.training.data.vocabulary import NewTokenizer
from xsake.training.data.windows import Windows

__all__ = [
    "Batch",
    "Built",
    "Index",
    "NewTokenizer",
    "Progress",
    "Settings",
    "TokenLoader",
    "Windows",
    "build",
    "read_index",
]
