"""Benchmark rows as one HTML page with a table and a chart per run."""

import dataclasses
from collections.abc import Iterable, Sequence

from xsake._format import format_bytes, format_seconds
from xsake.benchmarking.growth import fit_growths
from xsake.benchmarking.measure import PRODUCT
from xsake.benchmarking.rows import BenchmarkRow
from xsake.pages.frame import render_page
from xsake.pages.markup import Markup, element, join, scroll_region, table

WIDTH, BAR, GAP, LABEL = 640, 18, 8, 190  # of charts, in SVG units


@dataclasses.dataclass(frozen=True)
class BenchRun:
    """The rows of one interleaved run."""

    rows: tuple[BenchmarkRow, ...]

    @property
    def title(self) -> str:
        first = self.rows[0]
        shape = first.shape
        heads = f"{shape.q_heads} heads over {shape.kv_heads} of {shape.head_dim}"
        return f"{first.experiment}, {shape.kv_tokens:,} tokens, {heads}, {first.dtype}"


def page(rows: Sequence[BenchmarkRow]) -> str:
    """Render the page."""
    runs: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    sections: dict[str, Markup] = {"How to read it": _introduction(rows)}
    for number, run in enumerate(runs.values(), start=1):
        bench_run = BenchRun(tuple(run))
        sections[f"{number}. {bench_run.title}"] = _section(bench_run)
    fits = [
        (name, growth)
        for name, group in _group_by_setup(rows).items()
        for growth in fit_growths(group)
    ]
    if fits:
        sections["Growth"] = table(
            "Fits of seconds = factor x tokens ^ exponent, least squares of logarithms",
            ("side", "setup", "exponent", "largest residual", "lengths"),
            (
                (
                    x.side,
                    name,
                    x.exponent,
                    f"{x.largest_residual:.0%}",
                    ", ".join(map(str, x.tokens)),
                )
                for name, x in fits
            ),
        )
    return render_page("xsake bench", sections)


def _group_by_setup(rows: Iterable[BenchmarkRow]) -> dict[str, list[BenchmarkRow]]:
    """Group rows that differ in sequence length only."""
    groups: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        heads = f"{row.shape.q_heads} heads over {row.shape.kv_heads} of {row.shape.head_dim}"
        groups.setdefault(f"{row.experiment}, {heads}, {row.dtype}", []).append(row)
    return groups


def _introduction(rows: Sequence[BenchmarkRow]) -> Markup:
    first = rows[0]
    commit = "none" if first.commit is None else first.commit[:10] + ("+" if first.dirty else "")
    facts = (
        ("processor", first.cpu),
        ("device", first.device),
        ("cores", first.threads),
        ("commit", commit),
        ("made", first.utc),
        ("load before", first.load_average),
        ("versions", ", ".join(f"{name} {value}" for name, value in first.versions.items())),
    )
    text = (
        "All sides of a run are interleaved in one process. Ratios are taken per round and shown as"
        " median with quartiles; they are unclear if the interquartile range exceeds a quarter of"
        f" the median. '{PRODUCT}' is the time of one large matrix product in the same rounds,"
        " scaled to the flops of the listed blocks. Errors are the maximum over some rows, compared"
        " with float64."
    )
    return join((element("p", text), table("Environment", ("property", "value"), facts)))


def _section(run: BenchRun) -> Markup:
    others = list(dict.fromkeys(ratio.baseline for row in run.rows for ratio in row.ratios))
    columns = ("side", "budget", "seconds", *(f"of {x}" for x in others), "temporaries", "error")
    parts = [table(run.title, columns, (_cells(row, others) for row in run.rows))]
    if any(row.seconds is not None for row in run.rows):
        parts.insert(0, scroll_region(_bars(run.rows), f"chart: {run.title}"))
    return join(parts)


def _cells(row: BenchmarkRow, others: Sequence[str]) -> tuple[object, ...]:
    ratios = {ratio.baseline: ratio.spread.describe() for ratio in row.ratios}
    error = "" if row.max_error is None else f"{row.max_error:.1e}"
    return (
        row.side,
        "" if row.budget is None else f"{row.budget:.1%}",
        row.failure or ("" if row.seconds is None else format_seconds(row.seconds.median)),
        *(ratios.get(other, "") for other in others),
        "" if row.temp_bytes is None else format_bytes(row.temp_bytes),
        f"WRONG {error}" if row.is_correct is False else error,
    )


def _bars(rows: Iterable[BenchmarkRow]) -> Markup:
    """Draw bars of the median seconds, with a line between the quartiles."""
    timed = [(row, row.seconds) for row in rows if row.seconds is not None]
    longest = max(seconds.q75 for _, seconds in timed)
    width = WIDTH - LABEL - 90
    parts = []
    for index, (row, seconds) in enumerate(timed):
        top = index * (BAR + GAP)
        scale = lambda value: width * value / longest
        middle = top + BAR / 2
        colour = "var(--ours)" if row.is_own else "var(--choice)"
        parts += [
            element("text", row.side, x=LABEL - 8, y=top + 13, text_anchor="end"),
            element(
                "rect", x=LABEL, y=top, width=scale(seconds.median), height=BAR, fill=colour
            ),
            element(
                "line", x1=LABEL + scale(seconds.q25), x2=LABEL + scale(seconds.q75), y1=middle,
                y2=middle, stroke="var(--ink)", stroke_width=2,
            ),
            element(
                "text", format_seconds(seconds.median), x=LABEL + scale(seconds.q75) + 6, y=top + 13
            ),
        ]  # fmt: skip
    height = len(timed) * (BAR + GAP)
    return element(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height, role="img",
        aria_label="median seconds of every side", font_size=12, fill="currentColor",
    )  # fmt: skip
