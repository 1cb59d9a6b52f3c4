"""Evaluations as rich tables."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from xsake.evaluation.frontier import FrontierPoint
from xsake.evaluation.page_audit import PageAudit, QueryAudit
from xsake.evaluation.record import ContextResult, Estimate, EvaluationReport
from xsake.evaluation.tasks.record import PairedScore, TaskReport, TaskScores
from xsake.evaluation.tasks.summary import DepthShares, shares_by_depth
from xsake.evaluation.trial import TokenSpan

MAX_HEADS = 5  # listed by an audit
LOST_SHARE = 0.1  # of exact answers below dense from which a task is marked as lost
LOST_NATS = 0.5  # nats per token above dense from which a second copy is marked as lost


def report_view(report: EvaluationReport) -> RenderableType:
    """Render perplexity, NLL by position, far copies and notes."""
    parts: list[RenderableType] = [_contexts(report), _positions(report)]
    if report.far_copy:
        parts.append(_far_copies(report))
    parts += [f"[yellow]{escape(note)}[/]" for note in report.notes]
    return Group(*parts)


def _contexts(report: EvaluationReport) -> Table:
    """Build a table with one column per context, which fits 80 characters."""
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
    skipped = f" ({result.too_short} too short)" if result.too_short else ""
    yield "documents", f"{len(result.documents)}{skipped}"
    yield "windows", str(result.windows)
    yield "perplexity, dense", _estimate(result.perplexity, ".2f")
    comparison = result.comparison
    if comparison is not None:
        yield "perplexity, candidate", _estimate(comparison.perplexity, ".2f")
        yield "difference", _estimate(comparison.perplexity_difference, "+.2f")
        yield "KL(dense || candidate)", _estimate(comparison.kl, ".4f")
        yield "top-1 agreement", _estimate(comparison.agreement, ".1%")
        budget = comparison.budget
        yield "blocks computed", "unknown" if budget is None else f"{budget:.1%}"


def _positions(report: EvaluationReport) -> Table:
    """Build a table with one line per context and side."""
    longest = max(report.contexts, key=lambda result: result.context)
    table = _table("NLL by position, nats per token")
    table.add_column("context", justify="right")
    table.add_column("attention")
    for span in longest.by_position:
        table.add_column(str(TokenSpan(span.start, span.end)), justify="right")
    for result in report.contexts:
        dense = [f"{span.dense_nll:.3f}" for span in result.by_position]
        table.add_row(str(result.context), "dense", *dense)
        if report.candidate is not None:
            candidate = [f"{span.candidate_nll:.3f}" for span in result.by_position]
            divergence = [f"{span.kl:.4f}" for span in result.by_position]
            table.add_row("", "candidate", *candidate)
            table.add_row("", "KL", *divergence, style="dim")
    return table


def _far_copies(report: EvaluationReport) -> Table:
    passage, samples = report.far_copy[0].passage, len(report.far_copy[0].samples)
    table = _table(f"Far copy: {passage} tokens repeated after a gap, NLL (passages: {samples})")
    sides = ("dense",) if report.candidate is None else ("dense", "candidate")
    for name in (
        "gap",
        *(f"{copy} copy, {side}" for side in sides for copy in ("first", "second")),
    ):
        table.add_column(name, justify="right")
    for result in report.far_copy:
        first, second = result.first, result.second
        worst = max(sample.second_dense_nll for sample in result.samples)
        cells = [
            str(result.gap),
            f"{first.dense_nll:.3f}",
            f"{second.dense_nll:.3f} (worst {worst:.3f})",
        ]
        if first.candidate_nll is not None and second.candidate_nll is not None:
            is_lost = second.candidate_nll - second.dense_nll > LOST_NATS
            text = f"{second.candidate_nll:.3f}"
            cells += [
                f"{first.candidate_nll:.3f}",
                f"[bold red]{text} lost[/]" if is_lost else text,
            ]
        table.add_row(*cells)
    return table


def audit_view(audit: PageAudit) -> RenderableType:
    """Render an audit of pages: dropped mass, by position, worst heads, verdict."""
    total, count = audit.total, len(audit.documents)
    texts = f"{count} document{'' if count == 1 else 's'} of {audit.context:,} tokens"
    table = _table(f"{audit.model.name}, {audit.dtype}, {texts}: {total.queries:,} queries")
    plan = "one budget for all heads" if audit.plan is None else audit.plan.description
    table.caption = escape(f"{plan}; pages by {audit.selector}, {total.pages:.1%} read")
    for name in ("share of attention in pages not read", "certified", "true"):
        table.add_column(name, justify="right" if table.columns else "left")
    table.add_row(f"queries with at most {audit.eps:g}", *_audit_cells(total, "within", ".1%"))
    for name in ("mean", "median", "p90", "p99", "max"):
        table.add_row(name, *_audit_cells(total, name, ".4f"))
    positions = _table(f"Queries with at most {audit.eps:g}, by position")
    for name in ("tokens", "pages read", "certified", "true"):
        positions.add_column(name, justify="right")
    for span in audit.by_position:
        cells = _audit_cells(span, "within", ".1%")
        positions.add_row(f"{span.start}-{span.end}", f"{span.pages:.1%}", *cells)
    worst = sorted(audit.heads, key=lambda head: head.certified.within)[:MAX_HEADS]
    heads = ", ".join(f"L{x.layer}H{x.head} {x.certified.within:.0%}" for x in worst)
    verdict = (
        f"[bold red]{total.violations:,} certificates are violated[/]"
        if total.violations
        else f"[green]All {total.queries:,} certificates hold[/]"
    )
    notes = [f"[yellow]{escape(note)}[/]" for note in audit.notes]
    return Group(table, positions, f"Least certified heads: {heads}", *notes, verdict)


def _audit_cells(audit: QueryAudit, name: str, form: str) -> tuple[str, str]:
    return format(getattr(audit.certified, name), form), format(getattr(audit.true, name), form)


def task_view(report: TaskReport) -> RenderableType:
    """Render scores by task and context, averages, exact answers by depth, and notes."""
    parts: list[RenderableType] = [_task_cells(report)]
    if report.averages:
        parts.append(_task_averages(report))
    depths = shares_by_depth(report)
    if depths is not None:
        parts += [
            f"Exact answers by depth of the needle: {', '.join(depths)}",
            _task_depths(depths),
        ]
    excluded = sum(cell.is_excluded for cell in report.cells)
    if excluded:
        parts.append(
            f"[yellow]excluded from averages: {excluded} of {len(report.cells)} cells, where dense "
            f"attention has fewer than {report.min_exact:.0%} exact answers[/]"
        )
    parts += [f"[yellow]{escape(note)}[/]" for note in report.notes]
    return Group(*parts)


def _task_cells(report: TaskReport) -> Table:
    """Build a table with one line per task and context."""
    chat = ", chat template" if report.is_chat else ""
    table = _table(
        f"{report.model.name}, {report.dtype}{chat}: {report.samples} prompts per task and context"
    )
    if report.candidate is not None:
        table.caption = escape(f"dense, candidate: {report.candidate.description}")
    table.add_column("task", no_wrap=True, min_width=max(len(x.task) for x in report.cells))
    for name in ("tokens", "NLL", "exact %", "strings %", "greedy %"):
        table.add_column(name, justify="right")
    previous = None
    for cell in report.cells:
        name = "" if cell.task == previous else cell.task
        style = "dim" if cell.is_excluded else None
        table.add_row(name, str(cell.context), *_score_cells(cell), style=style)
        previous = cell.task
    return table


def _task_averages(report: TaskReport) -> Table:
    """Build a table with one line per context, and one of all; differences have intervals."""
    table = _table("Average of tasks")
    columns = ["tokens", "tasks", "excluded", "NLL", "exact", "strings", "greedy"]
    for name in columns:
        table.add_column(name, justify="right")
    for average in report.averages:
        scores = (
            (average.nll, "+.3f", ".3f"),
            *((score, "+.1%", ".1%") for score in (average.exact, average.strings, average.greedy)),
        )
        cells = [
            _pair_lines(score, form, sign) if score is not None else ""
            for score, sign, form in scores
        ]
        tokens = "all" if average.context is None else str(average.context)
        table.add_row(tokens, str(len(average.tasks)), str(average.excluded), *cells)
    return table


def _pair_lines(score: PairedScore, form: str, sign: str) -> str:
    """Return the values of both sides, and the difference with its interval on a second line."""
    dense = f"{score.dense.value:{form}}"
    if score.candidate is None or score.difference is None:
        return dense
    return f"{dense}, {score.candidate.value:{form}}\n{_estimate(score.difference, sign)}"


def _score_cells(scores: TaskScores) -> Iterator[str]:
    shares = scores.exact, scores.strings, scores.greedy
    for score, unit, form in ((scores.nll, 1, ".3f"), *((share, 100, ".0f") for share in shares)):
        if score is None:
            yield ""
            continue
        sides = [x.value for x in (score.dense, score.candidate) if x is not None]
        is_lost = len(sides) > 1 and score is scores.exact and sides[1] <= sides[0] - LOST_SHARE
        text = ", ".join(format(unit * value, form) for value in sides)
        yield f"[bold red]{text}[/]" if is_lost else text


def _task_depths(depths: dict[str, DepthShares]) -> Table:
    """Build a table with one line per depth and one column per context."""
    contexts = next(iter(depths.values())).contexts
    table = Table("depth")
    for context in contexts:
        table.add_column(str(context), justify="right")
    for row, depth in enumerate(next(iter(depths.values())).depths):
        cells = (
            ", ".join(
                "-" if np.isnan(x.shares[row, column]) else f"{x.shares[row, column]:.0%}"
                for x in depths.values()
            )
            for column in range(len(contexts))
        )
        table.add_row(f"{depth:.0%}", *cells)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", caption_justify="left")


def _estimate(estimate: Estimate, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{form}}"
    low, high = (format(edge, form) for edge in (estimate.low, estimate.high))
    return f"{estimate.value:{form}} [{low}, {high}]".replace("[", r"\[")


def frontier_table(points: Sequence[FrontierPoint]) -> Table:
    """Build a table with one line per point."""
    table = Table("attention", "cost", "perplexity", "gap, 95%", "KL", "same token")
    for point in points:
        compared, dense = point.comparison, point.report.contexts[0].perplexity.value
        gap = compared.perplexity_difference
        shares = [x / dense for x in (gap.value, gap.low, gap.high) if x is not None]
        table.add_row(
            point.name, f"{point.effective:.1%}", f"{compared.perplexity.value:.2f}",
            " ".join(f"{x:+.2%}" for x in shares), f"{compared.kl.value:.4f}",
            f"{compared.agreement.value:.1%}",
        )  # fmt: skip
    return table
