"""Module of `load_tuned_tiles` in 0.1.0."""

from xsake.benchmarking.tuning import TunedFile, load_tuned_tiles

__all__ = ["TunedFile", "load_tuned_tiles"]
