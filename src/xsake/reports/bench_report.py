"""Benchmark rows as an HTML page and as PNG plots."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xsake._format import format_bytes, format_commit, format_seconds
from xsake.benchmarking import BenchmarkRow
from xsake.benchmarking.growth import Growth, fit_growths
from xsake.benchmarking.measure import PRODUCT
from xsake.errors import ArgumentError
from xsake.reports import pages, plots


def page(rows: Sequence[BenchmarkRow]) -> str:
    """Render the page: the newest run of each setup, earlier runs folded, and scaling fits."""
    runs: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    setups: dict[tuple, list[list[BenchmarkRow]]] = {}
    for run in sorted(runs.values(), key=lambda run: run[0].utc, reverse=True):
        setups.setdefault(_setup(run), []).append(run)
    lengths: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        lengths.setdefault(f"{row.experiment}, {_heads(row)}", []).append(row)
    return pages.render(
        "bench_report.html.j2",
        extra="bench",
        setups={
            f"{number}. {topic}, {tokens:,} tokens, {heads}": [_run(run) for run in runs]
            for number, ((topic, heads, tokens), runs) in enumerate(sorted(setups.items()), 1)
        },
        growths=[(name, fit) for name, group in lengths.items() for fit in fit_growths(group)],
        newest=max(rows, key=lambda row: row.utc),
        product=PRODUCT,
    )


def _heads(row: BenchmarkRow) -> str:
    shape = row.shape
    return f"{shape.q_heads} heads over {shape.kv_heads} of {shape.head_dim}, {row.dtype}"


def _setup(run: Sequence[BenchmarkRow]) -> tuple[str, str, int]:
    """Return what all rows of a run share: experiment, layout and direction; heads; tokens."""
    layouts = {row.layout for row in run} - {"none"}
    parts = [run[0].experiment, *(layouts if len(layouts) == 1 else ()), run[0].direction]
    topic = ", ".join(part for part in dict.fromkeys(parts) if part != "forward")
    return topic, _heads(run[0]), run[0].shape.kv_tokens


def _run(run: Sequence[BenchmarkRow]) -> dict[str, Any]:
    """Return the table of a run; bars are shares of the longest time."""
    baselines = list(dict.fromkeys(ratio.baseline for row in run for ratio in row.ratios))
    longest = max((row.seconds.q75 for row in run if row.seconds is not None), default=1.0)
    lines = []
    for row in run:
        ratios = {ratio.baseline: ratio.spread.describe() for ratio in row.ratios}
        error = "" if row.max_error is None else f"{row.max_error:.1e}"
        times = row.seconds
        bar = () if times is None else (times.median, times.q25, times.q75 - times.q25)
        lines.append({
            "side": row.side,
            "is_own": row.is_own,
            "bar": [f"{100 * part / longest:.1f}" for part in bar],
            "failure": row.failure or "",
            "cells": [
                "" if times is None else format_seconds(times.median),
                "" if row.budget is None else f"{row.budget:.1%}",
                *(ratios.get(name, "") for name in baselines),
                "" if row.temp_bytes is None else format_bytes(row.temp_bytes),
                f"WRONG {error}" if row.is_correct is False else error,
            ],
        })  # fmt: skip
    origin = f"{run[0].utc}, commit {format_commit(run[0].commit, run[0].dirty)}"
    return {"origin": origin, "baselines": baselines, "lines": lines}


def draw_times(rows: Sequence[BenchmarkRow], path: Path, title: str) -> None:
    """Draw bars of the median seconds with quartile whiskers, fastest on top."""
    timed = [(row.seconds, row) for row in rows if row.seconds is not None]
    _require(timed, f"{len(rows)} rows, none with seconds")
    timed.sort(key=lambda pair: pair[0].median)
    with _open(path, 1.1 + 0.4 * len(timed), title, rows[0]) as figure:
        axes = figure.subplots()
        for y, (seconds, row) in enumerate(timed):
            colour = plots.OURS if row.is_own else plots.PEER
            axes.barh(y, seconds.median, color=colour, height=0.62)
            axes.plot([seconds.q25, seconds.q75], [y, y], color=plots.INK, linewidth=1.2)
            axes.text(seconds.q75, y, f"  {format_seconds(seconds.median)}", va="center", size=8)
        axes.set_yticks(range(len(timed)), [row.side for _, row in timed])
        axes.invert_yaxis()
        axes.margins(x=0.16)
        axes.set_xlabel("seconds per call (median, quartiles)")


def draw_budgets(rows: Sequence[BenchmarkRow], path: Path, title: str, *, baseline: str) -> None:
    """Draw the ratio to `baseline` against the budget, and the line time = budget."""
    points = [
        (row.shape.q_tokens, row.budget, ratio)
        for row in rows
        for ratio in row.ratios
        if row.budget is not None and ratio.baseline == baseline
    ]
    _require(points, f"{len(rows)} rows, none with a ratio to {baseline}")
    with _open(path, 4.6, title, rows[0]) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=plots.FAINT, linestyle="--", label="time = budget")
        for tokens in sorted({tokens for tokens, _, _ in points}):
            line = sorted(
                (budget, ratio.median, ratio.median - ratio.q25, ratio.q75 - ratio.median)
                for length, budget, ratio in points
                if length == tokens
            )
            x, y, below, above = zip(*line, strict=True)
            axes.errorbar(x, y, [below, above], marker="o", capsize=3, label=f"{tokens:,} tokens")
        axes.set(xlim=(0, 1), xlabel="budget (computed / causally visible blocks)")
        axes.set(ylim=(0, None), ylabel=f"time / time of {baseline}")
        axes.legend()


def draw_growth(fits: Sequence[Growth], rows: Sequence[BenchmarkRow], path: Path) -> None:
    """Draw microseconds per token against the length, both logarithmic, with the fits."""
    _require(fits, "no side was timed at three lengths")
    own = {row.side for row in rows if row.is_own}
    with _open(path, 4.6, "Cost of a token by length", rows[0]) as figure:
        axes = figure.subplots()
        others, styles = itertools.cycle(plots.SERIES[1:]), itertools.cycle(("-", "--", ":"))
        for fit in fits:
            is_own = fit.side in own
            colour, style = (plots.OURS, next(styles)) if is_own else (next(others), "-")
            measured = [1e6 * t / n for n, t in zip(fit.tokens, fit.seconds, strict=True)]
            axes.plot(fit.tokens, measured, "o", color=colour, ms=5)
            line = np.geomspace(fit.tokens[0], fit.tokens[-1], 50).tolist()
            label = f"{fit.side}: tokens^{fit.exponent:.2f}"
            values = [1e6 * fit.at(n) / n for n in line]
            axes.plot(line, values, style, color=colour, label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens")
        axes.set_ylabel("microseconds per token, forward")
        ticks = sorted({tokens for fit in fits for tokens in fit.tokens})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        plots.format_ticks(axes.yaxis, "{:g}", is_log=True)
        axes.minorticks_off()
        axes.legend(title="seconds of a whole pass grow as")


def _require(values: Iterable[object], got: str) -> None:
    if not values:
        raise ArgumentError("nothing-to-draw", "Nothing to draw.", got=got)


def _open(path: Path, height: float, title: str, row: BenchmarkRow) -> Any:
    commit = format_commit(row.commit, row.dirty)
    origin = f"{row.cpu}, {row.threads} threads, {row.dtype}, {commit}, {row.utc}"
    return plots.open_png(path, (7.5, height), title=title, origin=origin, extra="bench")
