"""Metrics, trackers, goodput and profiling of runs."""

from xsake.observability.fan import AsyncTrackers
from xsake.observability.metrics import METRICS, Metric, flatten_metrics
from xsake.observability.metrics_file import MetricsFile, read_metrics
from xsake.observability.tracker import Tracker

__all__ = [
    "METRICS",
    "AsyncTrackers",
    "Metric",
    "MetricsFile",
    "Tracker",
    "flatten_metrics",
    "read_metrics",
]
