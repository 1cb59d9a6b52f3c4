"""Plots of evaluations: NLL by position, far copies, tasks, loss against cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xsake._format import format_commit
from xsake.evaluation.frontier import FrontierPoint
from xsake.evaluation.record import ContextResult, EvaluationReport, FarCopyResult
from xsake.evaluation.tasks.record import TaskReport
from xsake.evaluation.tasks.registry import DEPTHS
from xsake.evaluation.tasks.summary import shares_by_depth
from xsake.evaluation.trial import TokenSpan
from xsake.reports import plots


def draw(report: EvaluationReport, path: Path) -> None:
    """Draw an evaluation; requires `pip install xsake[viz]`."""
    longest = max(report.contexts, key=lambda result: result.context)
    candidate, count = report.candidate, len(longest.documents)
    title = report.model.name + (f": dense and {candidate.description}" if candidate else "")
    files = ", ".join(file.name for file in report.texts[:3])
    more = f" and {len(report.texts) - 3} more" if len(report.texts) > 3 else ""
    texts = f"{count} document{'' if count == 1 else 's'} of {files}{more}"
    commit = format_commit(report.commit, report.dirty)
    origin = f"{texts}; {report.dtype}, {commit}, {report.made_at}"
    panels = 2 if report.far_copy else 1
    with plots.open_png(path, (5.4 * panels, 4.2), title=title, origin=origin) as figure:
        left, *right = figure.subplots(1, panels, squeeze=False)[0]
        _draw_positions(left, longest)
        for axes in right:
            _draw_far_copies(axes, report.far_copy)


def draw_tasks(report: TaskReport, path: Path) -> None:
    """Draw exact answers by task and context, and by depth; requires `pip install xsake[viz]`."""
    tasks = list(dict.fromkeys(cell.task for cell in report.cells))
    contexts = sorted({cell.context for cell in report.cells})
    sides = ["dense"] if report.candidate is None else ["dense", "candidate"]
    depths = shares_by_depth(report)
    rows = [1.2 + 0.24 * len(tasks)] + ([] if depths is None else [1.2 + 0.24 * len(DEPTHS)])
    size = 2.2 + len(sides) * (1.2 + 0.55 * len(contexts)), sum(rows) + 0.6
    title = report.model.name + (f": {report.candidate.description}" if report.candidate else "")
    origin = (
        f"{report.samples} prompts per cell, crossed out: dense below {report.min_exact:.0%}; "
        f"{report.dtype}, {format_commit(report.commit, report.dirty)}, {report.made_at}"
    )
    with plots.open_png(path, size, title=title, origin=origin) as figure:
        grid = figure.subplots(
            len(rows), len(sides), squeeze=False, gridspec_kw={"height_ratios": rows}
        )
        for column, side in enumerate(sides):
            axes, labels = grid[0, column], [f"{context:,}" for context in contexts]
            shares = np.full((len(tasks), len(contexts)), np.nan)
            for cell in report.cells:
                place = tasks.index(cell.task), contexts.index(cell.context)
                shares[place] = getattr(cell.exact, side).value
                if cell.is_excluded:
                    axes.plot(place[1], place[0], "x", color=plots.FAINT, ms=11, mew=0.7)
            _draw_shares(axes, shares, tasks, labels)
            axes.set_title(f"{side}: exact answers")
            if depths is not None:
                names = [f"{depth:.0%}" for depth in depths[side].depths]
                _draw_shares(grid[1, column], depths[side].shares, names, labels)
                grid[1, column].set(xlabel="tokens", ylabel="depth of the needle")


def _draw_shares(axes: Any, shares: np.ndarray, rows: list[str], columns: list[str]) -> None:
    plots.draw_heat_map(axes, shares, 1.0, "{:.0%}")
    axes.set_yticks(range(len(rows)), rows)
    axes.set_xticks(range(len(columns)), columns)


def draw_frontier(points: Sequence[FrontierPoint], path: Path) -> None:
    """Draw loss against cost, one line per type of attention; requires `pip install xsake[viz]`."""
    with plots.open_png(path, (6.0, 4.0)) as figure:
        axes = figure.subplots()
        for name, colour in (("plan", plots.OURS), ("window", plots.PEER)):
            line = sorted((x.effective, x.kl) for x in points if x.name == name)
            axes.plot(*zip(*line, strict=True), "o-", color=colour, label=name)
        axes.set(yscale="log", xlabel="cost / dense attention, selection included")
        axes.set_ylabel("KL of next tokens, nats")
        plots.format_ticks(axes.xaxis, "{:.0%}")
        plots.format_ticks(axes.yaxis, "{:g}", is_log=True)
        axes.grid()
        axes.legend()


def _draw_positions(axes: Any, result: ContextResult) -> None:
    spans = result.by_position
    series = [("dense", plots.PEER, [span.dense_nll for span in spans])]
    title = f"perplexity: dense {result.perplexity.value:.2f}"
    if result.comparison is not None:
        series.append(("candidate", plots.OURS, [span.candidate_nll or 0.0 for span in spans]))
        title += f", candidate {result.comparison.perplexity.value:.2f}"
    _draw_bars(axes, [str(TokenSpan(span.start, span.end)) for span in spans], series)
    axes.set(xlabel=f"position in a window of {result.context:,} tokens", title=title)
    axes.set_ylabel("NLL, nats per token")


def _draw_far_copies(axes: Any, results: Sequence[FarCopyResult]) -> None:
    series = [
        ("first copy", plots.FAINT, [result.first.dense_nll for result in results]),
        ("second copy, dense", plots.PEER, [result.second.dense_nll for result in results]),
    ]
    if results[0].second.candidate_nll is not None:
        heights = [result.second.candidate_nll or 0.0 for result in results]
        series.append(("second copy, candidate", plots.OURS, heights))
    _draw_bars(axes, [f"{result.gap:,}" for result in results], series)
    axes.set_xlabel("tokens between the copies")
    axes.set_title(f"far copy: a passage of {results[0].passage} tokens, repeated")


def _draw_bars(axes: Any, labels: list[str], series: list[tuple[str, str, list[float]]]) -> None:
    """Draw grouped bars with value labels."""
    width = 0.8 / len(series)
    for number, (name, colour, heights) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * width
        positions = [index + shift for index in range(len(labels))]
        bars = axes.bar(positions, heights, width * 0.94, color=colour, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1.2 * max(max(heights) for _, _, heights in series))  # space for the legend
    if len(series) > 1:
        axes.legend(loc="upper left", ncols=len(series), columnspacing=1)
