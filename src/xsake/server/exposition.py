"""Prometheus text format: latest metrics of runs, and counters of the server."""

import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from xsake.observability.metrics import METRICS
from xsake.server.runs import STATES, Run

PREFIX = "xsake_"
_MAX_HEADS = 4096  # per run; above it only the mean is exported


@dataclass(frozen=True)
class ServerCounters:
    """Counters of the server.

    Args:
        clients: current clients of live updates.
        dropped: updates lost by slow clients.
        answered: accepted requests.
        refused: requests rejected by the middleware.
        runs_left_out: runs beyond the limit.
        is_search_cut: whether the scan for runs ended at its limit.
        watcher_failures: failed polling rounds and dead threads.
        last_round: end of the last round in seconds since 1970.
    """

    clients: int
    dropped: int
    answered: int
    refused: int
    runs_left_out: int = 0
    is_search_cut: bool = False
    watcher_failures: int = 0
    last_round: float | None = None


def render(runs: Iterable[Run], counters: ServerCounters) -> str:
    """Render all metrics.

    Labels are ids, layers, heads and states, so that their number is bounded. The sanitized name of
    a run is in `xsake_run_info`.

    Args:
        runs: polled runs.
        counters: of the server.
    """
    listed = list(runs)
    summaries = [(run.summary(), run) for run in listed]
    families = [*_run_families(summaries), *_server_families(counters, listed)]
    return "".join(line for family in families for line in family)


def _run_families(summaries: list[tuple[dict[str, Any], Run]]) -> Iterator[list[str]]:
    label = {summary["id"]: f'run="{summary["id"]}"' for summary, _ in summaries}
    names = [(f'{label[s["id"]]},name="{s["name"]}"', 1) for s, _ in summaries]
    yield _family("run_info", "gauge", "name of the run", names)
    states = [
        (f'{label[s["id"]]},state="{state}"', int(s["state"] == state))
        for s, _ in summaries
        for state in STATES
    ]
    yield _family("run_state", "gauge", "1 for the current state", states)
    steps = [(label[s["id"]], s["step"] + 1) for s, _ in summaries]
    yield _family("steps_done", "gauge", "finished steps", steps)
    planned = [(label[s["id"]], s["steps"]) for s, _ in summaries if s["steps"] is not None]
    yield _family("steps_planned", "gauge", "total steps", planned)
    for name, metric in METRICS.items():
        text = f"{metric.meaning} ({metric.unit})"
        if metric.axes:
            samples = [pair for _, run in summaries for pair in _by_head(run, name, label[run.id])]
            yield _family(name, "gauge", text, samples)
        elif metric.source != "reader":
            values = [(label[run.id], run.latest.get(name)) for _, run in summaries]
            yield _family(name, "gauge", text, values)
    last = [(label[s["id"]], s["last_update_time"]) for s, _ in summaries]
    yield _family("last_update_time_seconds", "gauge", METRICS["last_update_time"].meaning, last)
    shares = [(label[run.id], run.goodput) for _, run in summaries]
    yield _family("goodput", "gauge", METRICS["goodput"].meaning, shares)
    skipped = [(label[run.id], run.skipped_total) for _, run in summaries]
    yield _family("skipped_total", "counter", METRICS["skipped_total"].meaning, skipped)
    for name, text in (
        ("dropped_lines", "invalid lines of metrics.jsonl"),
        ("dropped_values", "invalid values of valid lines"),
    ):
        short = name.removeprefix("dropped_")
        samples = [(label[run.id], getattr(run, name)) for _, run in summaries]
        yield _family(f"run_{short}_dropped_total", "counter", text, samples)


def _by_head(run: Run, name: str, label: str) -> Iterator[tuple[str, float]]:
    if name not in run.matrices:
        return
    _, matrix = run.matrices[name]
    if len(matrix) * len(matrix[0]) > _MAX_HEADS:
        numbers = matrix[np.isfinite(matrix)]
        if numbers.size:
            yield f'{label},layer="all",head="mean"', float(numbers.mean())
        return
    for layer, row in enumerate(matrix.tolist()):
        for head, value in enumerate(row):
            if value == value:  # not NaN
                yield f'{label},layer="{layer}",head="{head}"', value


def _server_families(counters: ServerCounters, runs: list[Run]) -> Iterator[list[str]]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    num_unreadable = sum(run.problem is not None for run in runs)
    num_failures = sum(run.num_failures for run in runs)
    num_rebuilt = sum(run.num_rebuilt for run in runs)
    for name, type, text, value in (
        ("server_clients", "gauge", "clients of live updates", counters.clients),
        ("server_dropped_events_total", "counter", "updates lost by slow clients",
         counters.dropped),
        ("server_requests_total", "counter", "accepted requests", counters.answered),
        ("server_refused_requests_total", "counter", "rejected requests", counters.refused),
        ("server_peak_memory_bytes", "gauge", "peak memory of the server", peak),
        ("server_runs", "gauge", "runs", len(runs)),
        ("server_runs_unreadable", "gauge", "unreadable runs", num_unreadable),
        ("server_runs_left_out", "gauge", "runs beyond the limit, not shown",
         counters.runs_left_out),
        ("server_search_is_cut", "gauge", "1 if the scan for runs ended at its limit",
         int(counters.is_search_cut)),
        ("server_run_failures_total", "counter", "failed attempts to read a run",
         num_failures),
        ("server_indexes_rebuilt_total", "counter", "rebuilt indexes",
         num_rebuilt),
        ("server_watcher_failures_total", "counter", "failed polling rounds",
         counters.watcher_failures),
        ("server_watcher_last_round_seconds", "gauge",
         "end of the last polling round in seconds since 1970", counters.last_round),
    ):  # fmt: skip
        yield _family(name, type, text, [("", value)])


def _family(
    name: str, type: str, text: str, samples: Iterable[tuple[str, float | int | None]]
) -> list[str]:
    full = PREFIX + name
    lines = [
        f"{full}{{{labels}}} {float(value)!r}\n" if labels else f"{full} {float(value)!r}\n"
        for labels, value in samples
        if value is not None
    ]
    if not lines:
        return []
    text = text.replace("\\", "\\\\").replace("\n", " ")
    return [f"# HELP {full} {text}\n", f"# TYPE {full} {type}\n", *lines]
