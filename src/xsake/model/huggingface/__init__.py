"""Hugging Face in and out: directories of transformers read into a decoder, and written again."""

from xsake.model.huggingface.exporting import export
from xsake.model.huggingface.loading import Loaded, load
from xsake.model.huggingface.report import LoadReport

__all__ = ["LoadReport", "Loaded", "export", "load"]
