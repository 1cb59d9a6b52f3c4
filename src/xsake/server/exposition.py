"""What Prometheus reads: the newest numbers of every run, and the server's own."""

import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from xsake.observability.metrics import METRICS
from xsake.server.runs import STATES, Run

PREFIX = "xsake_"
_MOST_HEADS = 4096  # of a run; of more there is only the mean


@dataclass(frozen=True)
class Counts:
    """What the server counts of itself.

    Args:
        clients: of live updates, now.
        dropped: updates that slow clients missed.
        answered: requests.
        refused: requests, by the guard.
        runs_left_out: runs beyond the limit.
        is_search_cut: whether the search for runs ended at its limit.
        watcher_failures: rounds of the watcher that failed, and threads that ended.
        last_round: when the last round ended, seconds since 1970.
    """

    clients: int
    dropped: int
    answered: int
    refused: int
    runs_left_out: int = 0
    is_search_cut: bool = False
    watcher_failures: int = 0
    last_round: float | None = None


def text_of(runs: Iterable[Run], counts: Counts) -> str:
    """All of it, in the text format.

    Labels are ids, layers, heads and states: nothing that a file could make endless. The name of a
    run, letters and digits alone, is in `xsake_run_info`.

    Args:
        runs: that are watched.
        counts: of the server.
    """
    listed = list(runs)
    summaries = [(run.summary(), run) for run in listed]
    families = [*_of_runs(summaries), *_of_server(counts, listed)]
    return "".join(line for family in families for line in family)


def _of_runs(summaries: list[tuple[dict[str, Any], Run]]) -> Iterator[list[str]]:
    label = {summary["id"]: f'run="{summary["id"]}"' for summary, _ in summaries}
    names = [(f'{label[s["id"]]},name="{s["name"]}"', 1) for s, _ in summaries]
    yield _family("run_info", "gauge", "which run it is", names)
    states = [
        (f'{label[s["id"]]},state="{state}"', int(s["state"] == state))
        for s, _ in summaries
        for state in STATES
    ]
    yield _family("run_state", "gauge", "1 for the state that the run is in", states)
    steps = [(label[s["id"]], s["step"] + 1) for s, _ in summaries]
    yield _family("steps_done", "gauge", "steps that are done", steps)
    planned = [(label[s["id"]], s["steps"]) for s, _ in summaries if s["steps"] is not None]
    yield _family("steps_planned", "gauge", "steps that the run will have", planned)
    for name, metric in METRICS.items():
        words = f"{metric.meaning} ({metric.unit})"
        if metric.axes:
            samples = [pair for _, run in summaries for pair in _by_head(run, name, label[run.id])]
            yield _family(name, "gauge", words, samples)
        elif metric.source != "reader":
            values = [(label[run.id], run.latest.get(name)) for _, run in summaries]
            yield _family(name, "gauge", words, values)
    last = [(label[s["id"]], s["last_told"]) for s, _ in summaries]
    yield _family("last_told_seconds", "gauge", METRICS["last_told"].meaning, last)
    shares = [(label[run.id], run.goodput) for _, run in summaries]
    yield _family("goodput", "gauge", METRICS["goodput"].meaning, shares)
    skipped = [(label[run.id], run.skipped_total) for _, run in summaries]
    yield _family("skipped_total", "counter", METRICS["skipped_total"].meaning, skipped)
    for name, words in (
        ("dropped_lines", "lines of metrics.jsonl that could not be used"),
        ("dropped_values", "numbers of other lines that could not be used"),
    ):
        short = name.removeprefix("dropped_")
        samples = [(label[run.id], getattr(run, name)) for _, run in summaries]
        yield _family(f"run_{short}_dropped_total", "counter", words, samples)


def _by_head(run: Run, name: str, label: str) -> Iterator[tuple[str, float]]:
    if name not in run.matrices:
        return
    _, matrix = run.matrices[name]
    if len(matrix) * len(matrix[0]) > _MOST_HEADS:
        numbers = matrix[np.isfinite(matrix)]
        if numbers.size:
            yield f'{label},layer="all",head="mean"', float(numbers.mean())
        return
    for layer, row in enumerate(matrix.tolist()):
        for head, value in enumerate(row):
            if value == value:  # not NaN
                yield f'{label},layer="{layer}",head="{head}"', value


def _of_server(counts: Counts, runs: list[Run]) -> Iterator[list[str]]:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    num_unreadable = sum(run.problem is not None for run in runs)
    num_failures = sum(run.num_failures for run in runs)
    num_rebuilt = sum(run.num_rebuilt for run in runs)
    for name, kind, words, value in (
        ("server_clients", "gauge", "clients of live updates", counts.clients),
        ("server_dropped_events_total", "counter", "updates that slow clients missed",
         counts.dropped),
        ("server_requests_total", "counter", "requests that were answered", counts.answered),
        ("server_refused_requests_total", "counter", "requests that were refused", counts.refused),
        ("server_peak_memory_bytes", "gauge", "most memory that the server has had", peak),
        ("server_runs", "gauge", "runs that are shown", len(runs)),
        ("server_runs_unreadable", "gauge", "runs that cannot be read now", num_unreadable),
        ("server_runs_left_out", "gauge", "runs beyond the limit, which are not shown",
         counts.runs_left_out),
        ("server_search_is_cut", "gauge", "1 if the search for runs ended at its limit",
         int(counts.is_search_cut)),
        ("server_run_failures_total", "counter", "attempts to read a run that failed",
         num_failures),
        ("server_indexes_rebuilt_total", "counter", "indexes of runs that were built again",
         num_rebuilt),
        ("server_watcher_failures_total", "counter", "rounds of the watcher that failed",
         counts.watcher_failures),
        ("server_watcher_last_round_seconds", "gauge",
         "when the watcher last read all runs, seconds since 1970", counts.last_round),
    ):  # fmt: skip
        yield _family(name, kind, words, [("", value)])


def _family(
    name: str, kind: str, words: str, samples: Iterable[tuple[str, float | int | None]]
) -> list[str]:
    full = PREFIX + name
    lines = [
        f"{full}{{{labels}}} {float(value)!r}\n" if labels else f"{full} {float(value)!r}\n"
        for labels, value in samples
        if value is not None
    ]
    if not lines:
        return []
    words = words.replace("\\", "\\\\").replace("\n", " ")
    return [f"# HELP {full} {words}\n", f"# TYPE {full} {kind}\n", *lines]
