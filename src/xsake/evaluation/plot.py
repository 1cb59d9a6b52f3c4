"""Plots of evaluations: NLL by position, far copies, loss against cost; requires matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from xsake.errors import MissingExtraError
from xsake.evaluation.frontier import FrontierPoint
from xsake.evaluation.record import ContextResult, EvaluationReport, FarCopyResult
from xsake.evaluation.trial import TokenSpan

DENSE, CANDIDATE, FIRST = "#30638e", "#d1495b", "#9aa5b1"


def draw(report: EvaluationReport, path: Path) -> None:
    """Draw an evaluation; requires `pip install xsake[viz]`."""
    panels = 2 if report.far_copy else 1
    figure = _figure(5.4 * panels, 4.2)
    left, *right = figure.subplots(1, panels, squeeze=False)[0]
    longest = max(report.contexts, key=lambda result: result.context)
    _draw_positions(left, longest)
    for axes in right:
        _draw_far_copies(axes, report.far_copy)
    for axes in (left, *right):
        axes.spines[["top", "right"]].set_visible(False)
    _title(figure, report, len(longest.documents))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, format="png")


def draw_frontier(points: Sequence[FrontierPoint], path: Path) -> None:
    """Draw loss against cost, one line per type of attention; requires `pip install xsake[viz]`."""
    figure = _figure(6.0, 4.0)
    axes = figure.subplots()
    for name, colour in (("plan", DENSE), ("window", CANDIDATE)):
        line = sorted((x.effective, x.kl) for x in points if x.name == name)
        axes.plot(*zip(*line, strict=True), "o-", color=colour, label=name)
    axes.set_yscale("log")
    axes.set_xlabel("cost / dense attention, selection included")
    axes.set_ylabel("KL of next tokens, nats")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _figure(width: float, height: float):
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Plots need matplotlib.", fix="pip install 'xsake[viz]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def _draw_positions(axes, result: ContextResult) -> None:
    spans = result.by_position
    series = [("dense", DENSE, [span.dense_nll for span in spans])]
    if result.comparison is not None:
        series.append(("candidate", CANDIDATE, [span.candidate_nll or 0.0 for span in spans]))
    _bars(axes, [str(TokenSpan(span.start, span.end)) for span in spans], series)
    axes.set_xlabel(f"position in a window of {result.context:,} tokens")
    axes.set_ylabel("NLL, nats per token")
    axes.set_title(_perplexities(result), loc="left", fontsize=10)


def _perplexities(result: ContextResult) -> str:
    text = f"perplexity: dense {result.perplexity.value:.2f}"
    if result.comparison is not None:
        text += f", candidate {result.comparison.perplexity.value:.2f}"
    return text


def _draw_far_copies(axes, results: Sequence[FarCopyResult]) -> None:
    series = [
        ("first copy", FIRST, [result.first.dense_nll for result in results]),
        ("second copy, dense", DENSE, [result.second.dense_nll for result in results]),
    ]
    if results[0].second.candidate_nll is not None:
        heights = [result.second.candidate_nll or 0.0 for result in results]
        series.append(("second copy, candidate", CANDIDATE, heights))
    _bars(axes, [f"{result.gap:,}" for result in results], series)
    axes.set_xlabel("tokens between the copies")
    passage = f"a passage of {results[0].passage} tokens, repeated"
    axes.set_title(f"far copy: {passage}", loc="left", fontsize=10)


def _bars(axes, labels: list[str], series: list[tuple[str, str, list[float]]]) -> None:
    """Draw grouped bars with value labels."""
    width = 0.8 / len(series)
    for number, (name, colour, heights) in enumerate(series):
        shift = (number - (len(series) - 1) / 2) * width
        positions = [index + shift for index in range(len(labels))]
        bars = axes.bar(positions, heights, width * 0.94, color=colour, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    highest = max(max(heights) for _, _, heights in series)
    axes.set_ylim(0, 1.2 * highest)  # space for the legend
    if len(series) > 1:
        axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=len(series), columnspacing=1)


def _title(figure, report: EvaluationReport, documents: int) -> None:
    """Add model, candidate and the origin of the numbers."""
    title = report.model.name
    if report.candidate is not None:
        title += f": dense and {report.candidate.description}"
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11, wrap=True)
    commit = "no commit" if report.commit is None else report.commit[:10]
    files = ", ".join(file.name for file in report.texts[:3])
    more = f" and {len(report.texts) - 3} more" if len(report.texts) > 3 else ""
    sources = f"{documents} document{'' if documents == 1 else 's'} of {files}{more}"
    origin = f"{sources}; {report.dtype}, {commit}{'+' if report.dirty else ''}, {report.made_at}"
    figure.supxlabel(origin, x=0.99, ha="right", fontsize=6, color="#555555")
