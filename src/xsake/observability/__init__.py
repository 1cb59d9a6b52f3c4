"""Eyes: what a run tells, in which words, to which files and trackers; knows nothing of models."""

from xsake.observability.fan import Fan
from xsake.observability.metrics import METRICS, Metric, flat
from xsake.observability.metrics_file import MetricsFile, read_metrics
from xsake.observability.tracker import Tracker

__all__ = ["METRICS", "Fan", "Metric", "MetricsFile", "Tracker", "flat", "read_metrics"]
