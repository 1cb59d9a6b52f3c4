"""Metrics, trackers, goodput and profiling of runs."""

from xsake.observability.log import MetricsFile, read_metrics
from xsake.observability.metrics import METRICS, Metric, flatten_metrics
from xsake.observability.trackers import AsyncTrackers, Tracker

__all__ = [
    "METRICS", "AsyncTrackers", "Metric", "MetricsFile", "Tracker", "flatten_metrics",
    "read_metrics",
]  # fmt: skip
