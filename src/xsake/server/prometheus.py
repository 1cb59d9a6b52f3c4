"""Prometheus metrics: latest metrics of runs, and counters of the server.

Labels are ids, layers, heads and states, so that their number is bounded. The sanitized name of a
run is in `xsake_run_info`.
"""

import resource
import time
from collections.abc import Iterable, Iterator

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from xsake.observability.metrics import METRICS
from xsake.server.runs import STATES, Poller, Run
from xsake.server.security import SecurityMiddleware
from xsake.server.stream import Broadcaster

_MAX_HEADS = 4096  # per run; above it only the mean is exported
_RUN = ("run",)
_Sample = tuple[tuple[str, ...], float | int | None]


class MetricsCollector(Collector):
    """Collect all metrics at a scrape."""

    def __init__(self, poller: Poller, broadcaster: Broadcaster, middleware: SecurityMiddleware):
        self._poller, self._broadcaster, self._middleware = poller, broadcaster, middleware

    def render(self) -> bytes:
        """Return all metrics in the text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of runs and of the server; families without a sample are left out."""
        runs = list(self._poller.runs.values())
        for family in (*_run_families(runs), *self._server_families(runs)):
            if family.samples:
                yield family

    def _server_families(self, runs: list[Run]) -> Iterator[Metric]:
        poller, middleware = self._poller, self._middleware
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        last = poller.last_round
        last_time = None if last is None else time.time() - (time.monotonic() - last)
        for name, text, value in (
            ("clients", "clients of live updates", len(self._broadcaster)),
            ("dropped_events_total", "updates lost by slow clients", self._broadcaster.dropped),
            ("requests_total", "accepted requests", middleware.answered),
            ("refused_requests_total", "rejected requests", middleware.rejected),
            ("peak_memory_bytes", "peak memory of the server", peak),
            ("runs", "runs", len(runs)),
            ("runs_unreadable", "unreadable runs", sum(run.problem is not None for run in runs)),
            ("runs_left_out", "runs beyond the limit, not shown",
             poller.scanned.num_omitted["run"]),
            ("search_is_cut", "1 if the scan for runs ended at its limit",
             poller.scanned.is_truncated),
            ("run_failures_total", "failed attempts to read a run",
             sum(run.num_failures for run in runs)),
            ("indexes_rebuilt_total", "rebuilt indexes", sum(run.num_rebuilt for run in runs)),
            ("watcher_failures_total", "failed polling rounds", poller.num_failures),
            ("watcher_last_round_seconds", "end of the last polling round in seconds since 1970",
             last_time),
        ):  # fmt: skip
            yield _family(f"server_{name}", text, (), [((), value)])


def _run_families(runs: list[Run]) -> Iterator[Metric]:
    summaries = [run.summary() for run in runs]
    names = [((s.id, s.name), 1) for s in summaries]
    yield _family("run_info", "name of the run", ("run", "name"), names)
    states = [((s.id, state), s.state == state) for s in summaries for state in STATES]
    yield _family("run_state", "1 for the current state", ("run", "state"), states)
    yield _family("steps_done", "finished steps", _RUN, [((s.id,), s.step + 1) for s in summaries])
    yield _family("steps_planned", "total steps", _RUN, [((s.id,), s.steps) for s in summaries])
    for name, metric in METRICS.items():
        text = f"{metric.meaning} ({metric.unit})"
        if metric.axes:
            samples = (sample for run in runs for sample in _by_head(run, name))
            yield _family(name, text, ("run", "layer", "head"), samples)
        elif metric.source != "reader":
            yield _family(name, text, _RUN, [((run.id,), run.latest.get(name)) for run in runs])
    updates = [((s.id,), s.last_update_time) for s in summaries]
    yield _family("last_update_time_seconds", METRICS["last_update_time"].meaning, _RUN, updates)
    for name, text, field in (
        ("goodput", METRICS["goodput"].meaning, "goodput"),
        ("skipped_total", METRICS["skipped_total"].meaning, "skipped_total"),
        ("run_lines_dropped_total", "invalid lines of metrics.jsonl", "dropped_lines"),
        ("run_values_dropped_total", "invalid values of valid lines", "dropped_values"),
    ):
        yield _family(name, text, _RUN, [((run.id,), getattr(run, field)) for run in runs])


def _by_head(run: Run, name: str) -> Iterator[_Sample]:
    if name not in run.matrices:
        return
    _, matrix = run.matrices[name]
    if matrix.size > _MAX_HEADS:
        numbers = matrix[np.isfinite(matrix)]
        if numbers.size:
            yield (run.id, "all", "mean"), float(numbers.mean())
        return
    for (layer, head), value in np.ndenumerate(matrix):
        if value == value:  # not NaN
            yield (run.id, str(layer), str(head)), float(value)


def _family(name: str, text: str, labels: tuple[str, ...], samples: Iterable[_Sample]) -> Metric:
    type = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = type(f"xsake_{name}", text, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, float(value))
    return family
