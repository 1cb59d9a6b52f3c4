"""Load and export Hugging Face checkpoints."""

from xsake.model.huggingface.exporting import export
from xsake.model.huggingface.loading import LoadedModel, load
from xsake.model.huggingface.report import LoadReport

__all__ = ["LoadReport", "LoadedModel", "export", "load"]
