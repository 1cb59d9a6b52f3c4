"""Rows as one HTML page: what was timed, beside what, with a chart for every run."""

import dataclasses
from collections.abc import Iterable, Sequence

from xsake._format import format_bytes, format_seconds
from xsake.bench.growth import growths
from xsake.bench.measure import PRODUCT
from xsake.bench.rows import BenchmarkRow
from xsake.pages.frame import framed
from xsake.pages.markup import Markup, element, joined, scrolled, table

WIDTH, BAR, GAP, LABEL = 640, 18, 8, 190  # of charts, in their own units


@dataclasses.dataclass(frozen=True)
class Run:
    """The rows of one interleaved run."""

    rows: tuple[BenchmarkRow, ...]

    @property
    def title(self) -> str:
        first = self.rows[0]
        shape = first.shape
        heads = f"{shape.q_heads} heads over {shape.kv_heads} of {shape.head_dim}"
        return f"{first.experiment}, {shape.kv_tokens:,} tokens, {heads}, {first.dtype}"


def page(rows: Sequence[BenchmarkRow]) -> str:
    """The whole page.

    Args:
        rows: of any experiments; every interleaved run gets its own part.
    """
    runs: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    sections: dict[str, Markup] = {"How to read it": _reading(rows)}
    for number, run in enumerate(runs.values(), start=1):
        whole = Run(tuple(run))
        sections[f"{number}. {whole.title}"] = _section(whole)
    grown = [(name, growth) for name, own in _alike(rows).items() for growth in growths(own)]
    if grown:
        sections["Growth"] = table(
            "Fits of seconds = factor x tokens ^ exponent, between logarithms",
            ("side", "of", "exponent", "largest residual", "lengths"),
            (
                (
                    x.side,
                    name,
                    x.exponent,
                    f"{x.largest_residual:.0%}",
                    ", ".join(map(str, x.tokens)),
                )
                for name, x in grown
            ),
        )
    return framed("xsake bench", sections)


def _alike(rows: Iterable[BenchmarkRow]) -> dict[str, list[BenchmarkRow]]:
    """Rows that differ in their length alone, by what they have in common."""
    found: dict[str, list[BenchmarkRow]] = {}
    for row in rows:
        heads = f"{row.shape.q_heads} heads over {row.shape.kv_heads} of {row.shape.head_dim}"
        found.setdefault(f"{row.experiment}, {heads}, {row.dtype}", []).append(row)
    return found


def _reading(rows: Sequence[BenchmarkRow]) -> Markup:
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
    words = (
        "All sides of a run take turns in one process. Ratios are taken round by round; the median"
        " is shown with quartiles, and none where the quartiles are more than a quarter of it"
        f" apart. '{PRODUCT}' is the time that one large matrix product, timed in the same rounds,"
        " would take for the products of the listed blocks. Errors are the largest of some rows"
        " against float64."
    )
    return joined((element("p", words), table("Where", ("what", "value"), facts)))


def _section(run: Run) -> Markup:
    others = list(dict.fromkeys(ratio.baseline for row in run.rows for ratio in row.ratios))
    columns = ("side", "budget", "seconds", *(f"of {x}" for x in others), "temporaries", "error")
    parts = [table(run.title, columns, (_cells(row, others) for row in run.rows))]
    if any(row.seconds is not None for row in run.rows):
        parts.insert(0, scrolled(_bars(run.rows), f"chart: {run.title}"))
    return joined(parts)


def _cells(row: BenchmarkRow, others: Sequence[str]) -> tuple[object, ...]:
    known = {ratio.baseline: ratio.spread.describe() for ratio in row.ratios}
    error = "" if row.max_error is None else f"{row.max_error:.1e}"
    return (
        row.side,
        "" if row.budget is None else f"{row.budget:.1%}",
        row.failure or ("" if row.seconds is None else format_seconds(row.seconds.median)),
        *(known.get(other, "") for other in others),
        "" if row.temp_bytes is None else format_bytes(row.temp_bytes),
        f"WRONG {error}" if row.is_correct is False else error,
    )


def _bars(rows: Iterable[BenchmarkRow]) -> Markup:
    """Bars of the median seconds, with a line from quartile to quartile."""
    timed = [(row, row.seconds) for row in rows if row.seconds is not None]
    longest = max(seconds.q75 for _, seconds in timed)
    room = WIDTH - LABEL - 90
    parts = []
    for place, (row, seconds) in enumerate(timed):
        top = place * (BAR + GAP)
        wide = lambda value: room * value / longest
        middle = top + BAR / 2
        colour = "var(--ours)" if row.is_own else "var(--choice)"
        parts += [
            element("text", row.side, x=LABEL - 8, y=top + 13, text_anchor="end"),
            element(
                "rect", x=LABEL, y=top, width=wide(seconds.median), height=BAR, fill=colour
            ),
            element(
                "line", x1=LABEL + wide(seconds.q25), x2=LABEL + wide(seconds.q75), y1=middle,
                y2=middle, stroke="var(--ink)", stroke_width=2,
            ),
            element(
                "text", format_seconds(seconds.median), x=LABEL + wide(seconds.q75) + 6, y=top + 13
            ),
        ]  # fmt: skip
    height = len(timed) * (BAR + GAP)
    return element(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height, role="img",
        aria_label="median seconds of every side", font_size=12, fill="currentColor",
    )  # fmt: skip
