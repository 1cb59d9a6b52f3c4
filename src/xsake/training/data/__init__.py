"""Training data: build token files from texts, and read them as batches in a fixed order."""

from xsake.training.data.building import BuildProgress, BuildResult, BuildSettings, build
from xsake.training.data.index import DataIndex, read_index
from xsake.training.data.loader import Batch, TokenLoader
from xsake.training.data.vocabulary import NewTokenizer
from xsake.training.data.windows import Windows

__all__ = [
    "Batch",
    "BuildResult",
    "DataIndex",
    "NewTokenizer",
    "BuildProgress",
    "BuildSettings",
    "TokenLoader",
    "Windows",
    "build",
    "read_index",
]
