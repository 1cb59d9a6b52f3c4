"""Rows and checks as rich tables."""

from collections.abc import Iterable

from rich.table import Table

from xsake._format import format_bytes, format_seconds
from xsake.benchmarking.rows import BenchmarkRow, TimingStats
from xsake.benchmarking.runner import Claim, Verdict

_COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.UNCLEAR: "yellow"}


def rows_table(rows: Iterable[BenchmarkRow], title: str = "") -> Table:
    """Build a table with one line per row: side, sizes, time, ratios, memory and error."""
    table = Table(title=title or None, title_justify="left")
    for name in ("side", "tokens", "budget", "time (quartiles)", "ratios", "memory", "error"):
        table.add_column(name, justify="left" if name in ("side", "ratios") else "right")
    for row in rows:
        time, memory = row.seconds, (row.temp_bytes, row.peak_bytes)
        error = "not finite" if row.max_error is None else f"{row.max_error:.1e}"
        table.add_row(
            row.side,
            str(row.shape.kv_tokens),
            "" if row.budget is None else f"{row.budget:.1%}",
            row.failure or ("" if time is None else _format_spread(time)),
            "\n".join(f"{ratio.spread.describe()} of {ratio.baseline}" for ratio in row.ratios),
            " / ".join(format_bytes(count) for count in memory if count is not None),
            {None: "", True: error, False: f"[bold red]WRONG {error}[/]"}[row.is_correct],
        )
    return table


def claims_table(claims: Iterable[Claim], title: str = "") -> Table:
    """Build a table with one line per check: topic, limit, measurement, verdict."""
    columns = "topic", "limit", "measured", "verdict"
    table = Table(*columns, title=title or None, title_justify="left")
    for claim in claims:
        verdict = f"[{_COLOURS[claim.verdict]}]{claim.verdict.value}[/]"
        table.add_row(claim.topic, claim.limit, claim.measured, verdict)
    return table


def _format_spread(seconds: TimingStats) -> str:
    low, high = format_seconds(seconds.q25), format_seconds(seconds.q75)
    return f"{format_seconds(seconds.median)} [{low}, {high}]"
