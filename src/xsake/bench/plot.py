"""Plots of rows as PNG; requires matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from xsake.benchmarking.growth import Growth
from xsake.benchmarking.rows import BenchmarkRow
from xsake.errors import ArgumentError, MissingExtraError

OURS, OTHERS, IDEAL = "#d1495b", "#30638e", "#9aa5b1"


def draw_times(rows: Sequence[BenchmarkRow], path: Path, title: str) -> None:
    """Draw bars of the median seconds with quartile whiskers, fastest on top."""
    timed = [(row.seconds, row) for row in rows if row.seconds is not None]
    if not timed:
        raise ArgumentError("Nothing to draw.", got=f"{len(rows)} rows, none with seconds")
    timed.sort(key=lambda pair: pair[0].median)
    figure, axes = _canvas(height=1.3 + 0.42 * len(timed))
    for y, (seconds, row) in enumerate(timed):
        median, low, high = (1e3 * part for part in (seconds.median, seconds.q25, seconds.q75))
        colour = OURS if row.is_own else OTHERS
        axes.barh(y, median, color=colour, height=0.62)
        axes.plot([low, high], [y, y], color="black", linewidth=1.2)
        axes.text(high, y, f"  {median:.4g} ms", va="center", fontsize=9)
    axes.set_yticks(range(len(timed)), [row.side for _, row in timed])
    axes.invert_yaxis()
    axes.margins(x=0.16)
    axes.set_xlabel("milliseconds per call (median, quartiles)")
    _finish(figure, axes, path, title, rows[0])


def draw_budgets(rows: Sequence[BenchmarkRow], path: Path, title: str, *, baseline: str) -> None:
    """Draw the ratio to `baseline` against the budget, and the line time = budget."""
    sparse = [row for row in rows if row.budget is not None and _has_ratio(row, baseline)]
    if not sparse:
        raise ArgumentError(
            "Nothing to draw.", got=f"{len(rows)} rows, none with a ratio to {baseline}"
        )
    figure, axes = _canvas(height=4.6)
    axes.plot([0, 1], [0, 1], color=IDEAL, linestyle="--", label="time = budget")
    for tokens in sorted({row.shape.q_tokens for row in sparse}):
        points = sorted(
            (row.budget or 0.0, row.ratio_to(baseline))
            for row in sparse
            if row.shape.q_tokens == tokens
        )
        middle = [ratio.median for _, ratio in points]
        below = [ratio.median - ratio.q25 for _, ratio in points]
        above = [ratio.q75 - ratio.median for _, ratio in points]
        axes.errorbar(
            [budget for budget, _ in points],
            middle,
            [below, above],
            marker="o",
            capsize=3,
            label=f"{tokens:,} tokens",
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("budget (computed / causally visible blocks)")
    axes.set_ylabel(f"time / time of {baseline}")
    axes.legend(frameon=False)
    _finish(figure, axes, path, title, sparse[0])


def draw_growth(fits: Sequence[Growth], rows: Sequence[BenchmarkRow], path: Path) -> None:
    """Draw microseconds per token against the length, both logarithmic, with the fits."""
    if not fits:
        raise ArgumentError("Nothing to draw.", got="no side was timed at three lengths")
    figure, axes = _canvas(height=4.6)
    for each in fits:
        line = np.geomspace(each.tokens[0], each.tokens[-1], 50).tolist()
        per_token = [
            1e6 * seconds / tokens
            for tokens, seconds in zip(each.tokens, each.seconds, strict=True)
        ]
        (mark,) = axes.plot(each.tokens, per_token, "o", markersize=5)
        label = f"{each.side}: tokens^{each.exponent:.2f}"
        fit = [1e6 * each.at(tokens) / tokens for tokens in line]
        axes.plot(line, fit, color=mark.get_color(), label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds per token, forward")
    ticks = sorted({tokens for each in fits for tokens in each.tokens})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(frameon=False, title="seconds of a whole pass grow as")
    _finish(figure, axes, path, "Cost of a token by length", rows[0])


def _has_ratio(row: BenchmarkRow, baseline: str) -> bool:
    return any(ratio.baseline == baseline for ratio in row.ratios)


def _canvas(height: float):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "Plots need matplotlib.", fix="pip install 'xsake[bench]'"
        ) from error
    figure = Figure(figsize=(7.5, height), layout="constrained")
    return figure, figure.subplots()


def _finish(figure, axes, path: Path, title: str, row: BenchmarkRow) -> None:
    """Add the title and the origin of the numbers, and save the file."""
    commit = "no commit" if row.commit is None else row.commit[:10] + ("+" if row.dirty else "")
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    origin = f"{row.cpu}, {row.threads} threads, {row.dtype}, {commit}, {row.utc}"
    figure.supxlabel(origin, x=0.99, ha="right", fontsize=6, color="#555555")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
