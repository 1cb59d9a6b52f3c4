"""Certificates as tables: for the screen, and as Markdown between two marks of a page.

python -m xsake.certify.table docs/hardware.md certificates
"""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from xsake._format import format_seconds
from xsake.certify.record import Certificate, Outcome, read_all
from xsake.errors import ArgumentError

START, END = "<!-- certificates -->", "<!-- end of certificates -->"
_BETWEEN = re.compile(f"(?<={START}\n).*?(?={END})", re.DOTALL)
_COLOURS = {"compiled": "green", "refused": "yellow", "crashed": "red"}


def outcomes_table(target: str, outcomes: Iterable[Outcome]) -> Table:
    """One line per case; what is not as expected is loud."""
    table = Table(title=f"xsake certify {target}", title_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("verdict")
    for name in (
        "fast memory",
        "SMEM",
        "spills",
        "bundles",
        "launches",
        "steps",
        "not faster than",
    ):
        table.add_column(name, justify="right")
    for outcome in outcomes:
        table.add_row(outcome.case.name, _verdict(outcome), *_numbers(outcome))
    return table


def surprises_text(outcomes: Iterable[Outcome]) -> str:
    """What was not as expected, with the words of the compiler; empty if nothing was."""
    parts = [
        f"{outcome.case.name}: {outcome.verdict}, expected {_expectation(outcome)}\n"
        f"{outcome.message or 'no message'}"
        for outcome in outcomes
        if not outcome.as_expected
    ]
    return "\n\n".join(parts)


def markdown(certificates: Iterable[Certificate]) -> str:
    """What is proved for each target, and for each family the largest figures of each pass."""
    certificates = list(certificates)
    families: dict[str, list[Certificate]] = {}
    for one in certificates:
        families.setdefault(one.family, []).append(one)
    tables = [["", *_passes(members)] for members in families.values()] or [["", *_passes([])]]
    return "\n".join([*_targets(certificates), *(line for part in tables for line in part), ""])


def updated(page: str, certificates: Iterable[Certificate]) -> str:
    """The page with the tables between its marks as they should be."""
    if not _BETWEEN.search(page):
        raise ArgumentError(
            "The page has no place for the tables.",
            expected=f"{START} and {END} on their own lines",
        )
    text = markdown(certificates)
    return _BETWEEN.sub(lambda _: text, page)


def _targets(certificates: list[Certificate]) -> list[str]:
    lines = [
        "| target | compiles | controls refused | not as expected | compiler | commits | newest |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in certificates:
        wanted = [x for x in one.outcomes if x.case.expects == "compiles"]
        controls = [x for x in one.outcomes if x.case.expects == "refused"]
        good = sum(x.as_expected for x in wanted), sum(x.as_expected for x in controls)
        own = {"xsake", "numpy", "python"}
        versions = ", ".join(f"{k} {v}" for k, v in one.versions.items() if k not in own)
        lines.append(
            f"| {one.target} ({one.device_kind}) | {good[0]} of {len(wanted)} "
            f"| {good[1]} of {len(controls)} | {len(one.surprises)} "
            f"| {versions} | {', '.join(one.commits)} | {one.made_at[:10]} |"
        )
    return lines


def _passes(certificates: list[Certificate]) -> list[str]:
    """Largest memory, spills and registers over the cases of a shape and pass, by target."""
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
    parts += [f"{name} {_size(max(memory))}"] if memory else []
    parts += [f"registers {max(registers)}"] if registers else []
    parts += [f"spills {max(spills)}{unit}"] if spills else []
    return ", ".join(parts) if members else ""


def _verdict(outcome: Outcome) -> str:
    if outcome.as_expected:
        control = " (as it must be)" if outcome.case.expects == "refused" else ""
        colour = "green" if control else _COLOURS[outcome.verdict]
        return f"[{colour}]{outcome.verdict}{control}[/]"
    return f"[bold red]{outcome.verdict.upper()}, expected {escape(_expectation(outcome))}[/]"


def _expectation(outcome: Outcome) -> str:
    case = outcome.case
    return case.expects if case.because is None else f"{case.expects} with {case.because!r}"


def _numbers(outcome: Outcome) -> list[str]:
    facts, cost, bound = outcome.facts, outcome.cost, outcome.bound
    return [
        "" if facts is None or facts.vmem_bytes is None else _size(facts.vmem_bytes),
        "" if facts is None or facts.smem_bytes is None else _size(facts.smem_bytes),
        "" if facts is None or facts.spills is None else str(facts.spills),
        "" if facts is None or facts.bundles is None else str(facts.bundles),
        "" if cost is None else str(cost.launches),
        "" if cost is None else f"{cost.steps:,}",
        "" if bound is None else format_seconds(bound.seconds),
    ]


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


def main(arguments: list[str]) -> int:
    """Bring the tables of a page up to date."""
    if len(arguments) != 2:
        sys.stderr.write("usage: python -m xsake.certify.table PAGE CERTIFICATES\n")
        return 2
    page = Path(arguments[0])
    certificates = read_all(Path(arguments[1]))
    page.write_text(updated(page.read_text(encoding="utf-8"), certificates), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
