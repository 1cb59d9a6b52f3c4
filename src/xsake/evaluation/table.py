"""Reports as rich tables: what a person reads first, the damage that perplexity hides included."""

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from xsake.evaluation.record import ContextResult, Estimate, FarCopyResult, Report
from xsake.evaluation.trial import Span

LOST = 0.5  # nats per token on the second copy beyond dense, from which on it is shown as lost


def report_view(report: Report) -> RenderableType:
    """Everything for the screen: perplexity, NLL by position, far copies and notes."""
    parts: list[RenderableType] = [_contexts(report), _positions(report)]
    if report.far_copy:
        parts.append(_far_copies(report))
    parts += [f"[yellow]{escape(note)}[/]" for note in report.notes]
    return Group(*parts)


def _contexts(report: Report) -> Table:
    """One column per context, so that intervals fit a terminal of 80 characters."""
    table = _table(f"{report.model.name}, {report.dtype}")
    table.add_column("context")
    for result in report.contexts:
        table.add_column(str(result.context), justify="right")
    if report.candidate is not None:
        table.caption = escape(f"candidate: {report.candidate.description}")
    columns = [dict(_context_cells(result)) for result in report.contexts]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _context_cells(result: ContextResult) -> Iterator[tuple[str, str]]:
    left_out = f" ({result.too_short} too short)" if result.too_short else ""
    yield "documents", f"{len(result.documents)}{left_out}"
    yield "windows", str(result.windows)
    yield "perplexity, dense", _estimate(result.perplexity, ".2f")
    found = result.comparison
    if found is not None:
        yield "perplexity, candidate", _estimate(found.perplexity, ".2f")
        yield "difference", _estimate(found.perplexity_difference, "+.2f")
        yield "KL(dense || candidate)", _estimate(found.kl, ".4f")
        yield "top-1 agreement", _estimate(found.agreement, ".1%")
        yield "blocks computed", "unknown" if found.budget is None else f"{found.budget:.1%}"


def _positions(report: Report) -> Table:
    """One line per context and side; windows of one length have the spans of shorter ones too."""
    longest = max(report.contexts, key=lambda result: result.context)
    table = _table("NLL by position, nats per token")
    table.add_column("context", justify="right")
    table.add_column("attention")
    for span in longest.by_position:
        table.add_column(str(Span(span.start, span.end)), justify="right")
    for result in report.contexts:
        dense = [f"{span.dense_nll:.3f}" for span in result.by_position]
        table.add_row(str(result.context), "dense", *dense)
        if report.candidate is not None:
            own = [f"{span.candidate_nll:.3f}" for span in result.by_position]
            divergence = [f"{span.kl:.4f}" for span in result.by_position]
            table.add_row("", "candidate", *own)
            table.add_row("", "KL", *divergence, style="dim")
    return table


def _far_copies(report: Report) -> Table:
    passage, samples = report.far_copy[0].passage, len(report.far_copy[0].samples)
    table = _table(f"Far copy: {passage} tokens repeated after a gap, NLL (passages: {samples})")
    for name in ("gap", "first copy, dense", "second copy, dense"):
        table.add_column(name, justify="right")
    if report.candidate is not None:
        table.add_column("first copy, candidate", justify="right")
        table.add_column("second copy, candidate", justify="right")
    for result in report.far_copy:
        table.add_row(*_far_copy_cells(result))
    return table


def _far_copy_cells(result: FarCopyResult) -> Iterator[str]:
    first, second = result.first, result.second
    yield str(result.gap)
    yield f"{first.dense_nll:.3f}"
    worst = max(sample.second_dense_nll for sample in result.samples)
    yield f"{second.dense_nll:.3f} (worst {worst:.3f})"
    if first.candidate_nll is not None and second.candidate_nll is not None:
        yield f"{first.candidate_nll:.3f}"
        is_lost = second.candidate_nll - second.dense_nll > LOST
        text = f"{second.candidate_nll:.3f}"
        yield f"[bold red]{text} lost[/]" if is_lost else text


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left")


def _estimate(found: Estimate, form: str) -> str:
    if found.low is None or found.high is None:
        return f"{found.value:{form}}"
    low, high = (format(edge, form) for edge in (found.low, found.high))
    return f"{found.value:{form}} [{low}, {high}]".replace("[", r"\[")
