"""`xsake doctor --kernels`: the conformance table on the device that is here, and its report.

The one module of the package that imports the oracles, and therefore imported only when asked for.
"""

import collections
import dataclasses
import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import rich.console
import rich.table
import typer
from rich.markup import escape

import xsake
from xsake._io import atomic_write
from xsake._provenance import environment, own_checkout, source_digest
from xsake.certify.words import tidy
from xsake.cli.screen import MovingLine
from xsake.errors import UnsupportedError
from xsake.kernels import select
from xsake.testing.budget import Report as Judgement
from xsake.testing.case_table import CASES
from xsake.testing.cases import Case
from xsake.testing.conformance import check_case, failures

SCHEMA_VERSION = 1
INTERRUPTED, CANNOT_RUN = 130, 2  # exit codes
# What may change a result without a trace in the versions.
SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

Verdict = Literal["passed", "failed", "declined"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation in one case.

    Args:
        implementation, case, dtype: what was run.
        verdict: failed if a rule of the numerical standard is broken or an error came up.
        words: the broken rules, the error, or the reason for declining; None if it passed.
        seconds: with compilation and the oracle, so no measure of speed.
        arrays: errors of out, lse and every gradient; None where a number is not finite.
    """

    implementation: str
    case: str
    dtype: str
    verdict: Verdict
    words: str | None
    seconds: float
    arrays: tuple[dict[str, Any], ...] = ()

    @property
    def used(self) -> float | None:
        """The largest share of an allowance that an array used, 1 being the limit."""
        shares = (array["allowance_used"] for array in self.arrays)
        return max((share for share in shares if share is not None), default=None)


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found so far.

    Args:
        facts: device, versions, commit and settings.
        asked: the implementations that are run.
        cases: how many cases each of them has to go through.
        rows: what is done.
        running: (implementation, case) under way when this was written, None between two.
    """

    facts: dict[str, Any]
    asked: tuple[str, ...]
    cases: int
    rows: tuple[Row, ...] = ()
    running: tuple[str, str] | None = None

    @property
    def complete(self) -> bool:
        """Whether everything that was asked for is done."""
        return len(self.rows) == len(self.asked) * self.cases

    @property
    def healthy(self) -> bool:
        """True if nothing failed and every implementation passed something."""
        passed = {row.implementation for row in self.rows if row.verdict == "passed"}
        no_failure = all(row.verdict != "failed" for row in self.rows)
        return self.complete and no_failure and passed == set(self.asked)

    def of(self, implementation: str, verdict: Verdict) -> list[Row]:
        """The rows of one implementation with one verdict."""
        return [
            row
            for row in self.rows
            if (row.implementation, row.verdict) == (implementation, verdict)
        ]

    def to_json(self) -> str:
        """The report as text for a file."""
        verdicts = collections.Counter((row.implementation, row.verdict) for row in self.rows)
        plain = {
            "schema_version": SCHEMA_VERSION,
            "complete": self.complete,
            "healthy": self.healthy,
            **self.facts,
            "asked": self.asked,
            "cases": self.cases,
            "running": self.running,
            "summary": {
                name: {verdict: verdicts[name, verdict] for verdict in VERDICTS}
                for name in self.asked
            },
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        return json.dumps(plain, indent=1, allow_nan=False) + "\n"


@dataclasses.dataclass(frozen=True)
class Step:
    """Where a run is: at the beginning of a case if there is no row yet, else at its end."""

    number: int
    total: int
    implementation: str
    case: str
    elapsed_seconds: float
    row: Row | None = None


def examine(
    names: Iterable[str], keep: Callable[[Report], None], watch: Callable[[Step], None]
) -> Report:
    """Runs implementations through the table; Ctrl-C ends it with what is done by then.

    Args:
        names: implementations that can run here.
        keep: gets the report before every case and at the end: a device that takes the whole
            process down must not take the report with it.
        watch: gets every step.

    Returns:
        The last report.
    """
    report = Report(_facts(), tuple(names), len(CASES))
    start, total = time.perf_counter(), len(report.asked) * len(CASES)
    pairs = [(name, case) for name in report.asked for case in CASES]
    try:
        for number, (name, case) in enumerate(pairs, 1):
            report = dataclasses.replace(report, running=(name, case.name))
            keep(report)
            watch(Step(number, total, name, case.name, time.perf_counter() - start))
            row = _run(name, case)
            report = dataclasses.replace(report, rows=(*report.rows, row), running=None)
            watch(Step(number, total, name, case.name, time.perf_counter() - start, row))
    except KeyboardInterrupt:
        pass  # the report itself says that it is not complete
    keep(report)
    return report


def _run(name: str, case: Case) -> Row:
    """One case, whatever comes of it."""
    start, found = time.perf_counter(), []
    verdict: Verdict = "passed"
    words = None
    try:
        # The error budget assumes float32 products, which accelerators compute only on request.
        with jax.default_matmul_precision("highest"):
            found = check_case(xsake.attention, case, name)
    except UnsupportedError as error:
        verdict, words = "declined", str(error.got or error.what)
    except Exception as error:  # noqa: BLE001 - on a new device every error is a finding
        verdict, words = "failed", tidy(f"{type(error).__name__}: {error}", {})
    broken = failures(found)
    if broken:
        verdict, words = "failed", "; ".join(broken)
    arrays = tuple(_array(judgement) for judgement in found)
    seconds = round(time.perf_counter() - start, 3)
    return Row(name, case.name, case.dtype, verdict, words, seconds, arrays)


def _array(judgement: Judgement) -> dict[str, Any]:
    """The errors of one array as JSON has them."""
    numbers = {
        "max_error": judgement.max_error,
        "naive_max_error": judgement.naive_max_error,
        "max_ratio": judgement.max_ratio,
        "rms_error": judgement.rms_error,
        "naive_rms_error": judgement.naive_rms_error,
        "rms_ratio": judgement.rms_ratio,
        "allowance_used": judgement.used,
    }
    finite = {name: x if math.isfinite(x) else None for name, x in numbers.items()}
    return {"array": judgement.name, **finite, "failure": judgement.failure}


def _facts() -> dict[str, Any]:
    """With what and on what; no names of machines or people."""
    here, device = environment(own_checkout()), jax.devices()[0]
    every = ((found.name, found.version) for found in importlib.metadata.distributions())
    related = {name: x for name, x in every if name and name.startswith(("jax", "libtpu"))}
    return {
        "made_at": here.utc,
        "commit": here.commit,
        "dirty": here.dirty,
        "source": source_digest(),
        "versions": dict(sorted({**related, **here.versions}.items())),
        "platform": select.default_platform(),
        "platform_version": tidy(device.client.platform_version, {}),
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "host_processor": here.cpu,
        "settings": {name: tidy(os.environ[name], {}) for name in SETTINGS if name in os.environ},
        "implementations": select.implementations(),
    }


def main(implementation: str | None, path: Path | None, as_json: bool) -> int:
    """The whole command; returns its exit code.

    Args:
        implementation: the only one to run; None for all that can run here.
        path: where the report is written; None for a file named after the platform.
        as_json: print the report itself and nothing else.
    """
    known = select.implementations()
    runnable = [name for name, reason in known.items() if reason is None]
    if implementation is not None and implementation not in runnable:
        why = known.get(implementation, f"there is none of that name, only {', '.join(known)}")
        typer.echo(f"{implementation} cannot run here: {why}", err=True)
        return CANNOT_RUN
    path = path or Path(f"xsake-kernels-{select.default_platform()}.json")
    names = runnable if implementation is None else [implementation]
    console = rich.console.Console(quiet=as_json)
    try:
        with _Screen(console) as screen:
            report = examine(
                names, lambda report: atomic_write(path, report.to_json()), screen.show
            )
    except OSError as error:
        typer.echo(f"The report cannot be written: {error}", err=True)
        return CANNOT_RUN
    if as_json:
        typer.echo(report.to_json(), nl=False)
    console.print(render(report, path))
    return INTERRUPTED if not report.complete else int(not report.healthy)


class _Screen(MovingLine):
    """Progress: one moving line on a terminal, a line per case elsewhere; failures at once."""

    def show(self, step: Step) -> None:
        """What a run is doing."""
        row, where = step.row, f"{step.implementation} {step.case}"
        done = step.number - (row is None)
        self.update(done, step.total, where)
        if row is not None and (row.verdict == "failed" or not self.console.is_terminal):
            style = {"failed": "bold red", "declined": "yellow", "passed": "green"}[row.verdict]
            self.console.print(
                f"{step.number} of {step.total}, {step.elapsed_seconds:.0f} s: {where} "
                f"[{style}]{row.verdict}[/]"
            )


def render(report: Report, path: Path) -> rich.console.RenderableType:
    """One table, the words of what failed or was declined, and where the report is."""
    facts = report.facts
    table = rich.table.Table(
        title=f"xsake doctor --kernels on {facts['platform']} ({facts['device_kind']})",
        title_justify="left",
    )
    table.add_column("implementation")
    for name in ("passed", "failed", "declined", "allowance used"):
        table.add_column(name, justify="right")
    table.add_column("in case", overflow="fold")
    for name in report.asked:
        table.add_row(name, *_counts(report, name), *_worst(report, name))
    parts: list[rich.console.RenderableType] = [table]
    for row in (row for name in report.asked for row in report.of(name, "failed")):
        first, *_ = (row.words or "").splitlines() or [""]
        parts.append(f"[bold red]{row.implementation} {row.case}:[/] {escape(first)}")
    for name in report.asked:
        for reason, cases in _reasons(report.of(name, "declined")).items():
            text = f"{name} declined {len(cases)}: {reason} ({', '.join(cases)})"
            parts.append(f"[yellow]{escape(text)}[/]")
    for name, reason in facts["implementations"].items():
        if reason is not None:
            parts.append(f"[dim]{escape(f'{name} cannot run here: {reason}')}[/]")
    if not report.complete:
        total = len(report.asked) * report.cases
        parts.append(f"[bold yellow]Interrupted after {len(report.rows)} of {total}.[/]")
    parts.append(f"The report is in {escape(str(path))}. Please send it to us, whatever it says.")
    return rich.console.Group(*parts)


def _counts(report: Report, name: str) -> list[str]:
    passed, failed, declined = (len(report.of(name, verdict)) for verdict in VERDICTS)
    return [str(passed), f"[bold red]{failed}[/]" if failed else "0", str(declined)]


def _worst(report: Report, name: str) -> list[str]:
    """The largest share of an allowance that an error used, and the case."""
    rows = [row for row in report.rows if row.implementation == name and row.used is not None]
    if not rows:
        return ["", ""]
    worst = max(rows, key=lambda row: row.used or 0.0)
    return [f"{worst.used:.0%}", worst.case]


def _reasons(rows: Iterable[Row]) -> dict[str, list[str]]:
    """Cases by the reason for declining them."""
    found = collections.defaultdict(list)
    for row in rows:
        found[row.words or ""].append(row.case)
    return dict(found)
