"""Load and export Hugging Face checkpoints."""

from xsake.model.huggingface.exporting import export
from xsake.model.huggingface.loading import LoadedModel, LoadReport, load

__all__ = ["LoadReport", "LoadedModel", "export", "load"]
