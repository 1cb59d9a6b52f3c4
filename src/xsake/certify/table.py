"""Render certificates as tables: for the terminal, and as Markdown between two markers.

python -m xsake.certify.table docs/hardware.md certificates
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from xsake._format import format_seconds
from xsake.certify.record import Certificate, Outcome, read_certificates
from xsake.errors import ArgumentError

START, END = "<!-- certificates -->", "<!-- end of certificates -->"
_BETWEEN = re.compile(f"(?<={START}\n).*?(?={END})", re.DOTALL)
_COLOURS = {"compiled": "green", "refused": "yellow", "crashed": "red"}


def outcomes_table(target: str, outcomes: Iterable[Outcome]) -> Table:
    """Return one row per case; unexpected outcomes are highlighted."""
    table = Table(title=f"xsake certify {target}", title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("verdict")
    for name in ("fast memory", "SMEM", "spills", "bundles", "launches", "steps", "lower bound"):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(outcome.case.name, _format_verdict(outcome), *_format_figures(outcome))
    return table


def format_failures(outcomes: Iterable[Outcome]) -> str:
    """List unexpected outcomes with the compiler's messages."""
    parts = [
        f"{outcome.case.name}: {outcome.verdict}, expected {_format_expectation(outcome)}\n"
        f"{outcome.message or 'no message'}"
        for outcome in outcomes
        if not outcome.as_expected
    ]
    return "\n\n".join(parts)


def markdown(certificates: Iterable[Certificate]) -> str:
    """Return a table of targets, and per family a table of the largest figures of each pass."""
    certificates = list(certificates)
    families: dict[str, list[Certificate]] = {}
    for one in certificates:
        families.setdefault(one.family, []).append(one)
    lines = _target_table(certificates)
    for members in families.values() or [[]]:
        lines += ["", *_pass_table(members)]
    return "\n".join([*lines, ""])


def update_page(page: str, certificates: Iterable[Certificate]) -> str:
    """Return the page with updated tables between its markers."""
    if not _BETWEEN.search(page):
        raise ArgumentError(
            "table-markers",
            "The page has no markers for the tables.",
            expected=f"{START} and {END} on their own lines",
        )
    text = markdown(certificates)
    return _BETWEEN.sub(lambda _: text, page)


def _target_table(certificates: list[Certificate]) -> list[str]:
    lines = [
        "| target | compiles | controls refused | not as expected | compiler | commits | newest |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in certificates:
        positives = [x for x in one.outcomes if x.case.expects == "compiles"]
        controls = [x for x in one.outcomes if x.case.expects == "refused"]
        good = sum(x.as_expected for x in positives), sum(x.as_expected for x in controls)
        skipped = {"xsake", "numpy", "python"}
        versions = ", ".join(f"{k} {v}" for k, v in one.versions.items() if k not in skipped)
        lines.append(
            f"| {one.target} ({one.device_kind}) | {good[0]} of {len(positives)} "
            f"| {good[1]} of {len(controls)} | {len(one.unexpected)} "
            f"| {versions} | {', '.join(one.commits)} | {one.made_at[:10]} |"
        )
    return lines


def _pass_table(certificates: list[Certificate]) -> list[str]:
    """Return the largest memory, spills and registers by shape, pass and target."""
    lines = [
        "| heads of | pass | " + " | ".join(one.target for one in certificates) + " |",
        "|---|---|" + "---|" * len(certificates),
    ]
    groups = {
        (x.case.shape, x.case.pass_name): None
        for one in certificates
        for x in one.outcomes
        if x.case.expects == "compiles"
    }
    for shape, pass_name in sorted(groups):
        cells = [_cell(one, shape, pass_name) for one in certificates]
        lines.append(f"| {shape} | {pass_name} | " + " | ".join(cells) + " |")
    return lines


def _cell(certificate: Certificate, shape: str, pass_name: str) -> str:
    members = [
        x
        for x in certificate.outcomes
        if (x.case.shape, x.case.pass_name, x.case.expects) == (shape, pass_name, "compiles")
    ]
    facts = [x.facts for x in members if x.facts is not None]
    parts = [f"{sum(x.as_expected for x in members)} of {len(members)}"]
    memory = [x.vmem_bytes for x in facts if x.vmem_bytes is not None]
    spills = [x.spills for x in facts if x.spills is not None]
    registers = [x.details["registers"] for x in facts if "registers" in x.details]
    name, unit = ("VMEM", "") if certificate.family == "tpu" else ("shared", " B")
    parts += [f"{name} {_format_size(max(memory))}"] if memory else []
    parts += [f"registers {max(registers)}"] if registers else []
    parts += [f"spills {max(spills)}{unit}"] if spills else []
    return ", ".join(parts) if members else ""


def _format_verdict(outcome: Outcome) -> str:
    if outcome.as_expected:
        control = " (as expected)" if outcome.case.expects == "refused" else ""
        colour = "green" if control else _COLOURS[outcome.verdict]
        return f"[{colour}]{outcome.verdict}{control}[/]"
    return (
        f"[bold red]{outcome.verdict.upper()}, expected {escape(_format_expectation(outcome))}[/]"
    )


def _format_expectation(outcome: Outcome) -> str:
    case = outcome.case
    return case.expects if case.because is None else f"{case.expects} with {case.because!r}"


def _format_figures(outcome: Outcome) -> list[str]:
    facts, cost, bound = outcome.facts, outcome.cost, outcome.bound
    figures: tuple[tuple[Any, Callable[[Any], str]], ...] = (
        (facts and facts.vmem_bytes, _format_size), (facts and facts.smem_bytes, _format_size),
        (facts and facts.spills, str), (facts and facts.bundles, str),
        (cost and cost.launches, str), (cost and cost.steps, "{:,}".format),
        (bound and bound.seconds, format_seconds),
    )  # fmt: skip
    return ["" if value is None else form(value) for value, form in figures]


def _format_size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def main(arguments: list[str]) -> int:
    """Update the tables of a page."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m xsake.certify.table PAGE CERTIFICATES\n")
        return 2
    page = Path(arguments[0])
    certificates = read_certificates(Path(arguments[1]))
    page.write_text(update_page(page.read_text(encoding="utf-8"), certificates), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
