"""Rows and checks as rich tables."""

from collections.abc import Iterable

from rich.table import Table

from xsake._format import format_bytes, format_seconds
from xsake.bench.claims import Claim, Verdict
from xsake.bench.rows import BenchmarkRow, TimingStats

_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.UNCLEAR: "yellow"}


def rows_table(rows: Iterable[BenchmarkRow], title: str = "") -> Table:
    """Build a table with one line per row: side, sizes, time, ratios, memory and error."""
    table = Table(title=title or None, title_justify="left")
    for name in ("side", "tokens", "budget", "time (quartiles)", "ratios", "memory", "error"):
        table.add_column(name, justify="left" if name in ("side", "ratios") else "right")
    for row in rows:
        table.add_row(
            row.side,
            str(row.shape.kv_tokens),
            "" if row.budget is None else f"{row.budget:.1%}",
            row.failure or ("" if row.seconds is None else _format_timing(row.seconds)),
            "\n".join(f"{ratio.spread.describe()} of {ratio.baseline}" for ratio in row.ratios),
            _format_memory(row),
            _format_error(row),
        )
    return table


def claims_table(claims: Iterable[Claim], title: str = "") -> Table:
    """Build a table with one line per check: topic, limit, measurement, verdict."""
    table = Table(
        "topic", "limit", "measured", "verdict", title=title or None, title_justify="left"
    )
    for claim in claims:
        colour = _COLOURS[claim.verdict]
        table.add_row(
            claim.topic, claim.limit, claim.measured, f"[{colour}]{claim.verdict.value}[/]"
        )
    return table


def _format_timing(timing: TimingStats) -> str:
    low, high = format_seconds(timing.q25), format_seconds(timing.q75)
    return f"{format_seconds(timing.median)} [{low}, {high}]"


def _format_memory(row: BenchmarkRow) -> str:
    counts = [count for count in (row.temp_bytes, row.peak_bytes) if count is not None]
    return " / ".join(format_bytes(count) for count in counts)


def _format_error(row: BenchmarkRow) -> str:
    if row.is_correct is None:
        return ""
    error = "not finite" if row.max_error is None else f"{row.max_error:.1e}"
    return error if row.is_correct else f"[bold red]WRONG {error}[/]"
