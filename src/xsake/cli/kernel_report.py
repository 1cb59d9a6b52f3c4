"""`xsake doctor --kernels`: run the conformance suite on this device and write a report.

The only module of the package that imports the oracles; imported lazily.
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
from xsake._provenance import checkout_root, environment, source_digest
from xsake.certify.record import sanitize
from xsake.cli.screen import ProgressBar
from xsake.errors import UnsupportedError
from xsake.kernels import dispatch
from xsake.kernels.block_sparse.api import OP
from xsake.testing.budget import ErrorReport as Judgement
from xsake.testing.case_table import CASES
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import check_case, failures

SCHEMA_VERSION = 1
INTERRUPTED, CANNOT_RUN = 130, 2  # exit codes
# Environment variables that may change results.
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")

Verdict = Literal["passed", "failed", "declined"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclasses.dataclass(frozen=True)
class ConformanceRow:
    """Result of one implementation in one case.

    Args:
        implementation, case, dtype: identity of the test.
        verdict: failed if a rule of the numerical standard is broken or an error was raised.
        words: broken rules, error message or reason for declining; None if it passed.
        seconds: total, compilation and oracle included; not a speed measurement.
        arrays: errors of out, lse and every gradient; non-finite numbers become None.
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
        """Largest ratio of error to allowance over all arrays; the limit is 1."""
        ratios = (array["allowance_used"] for array in self.arrays)
        return max((ratio for ratio in ratios if ratio is not None), default=None)


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """Results so far.

    Args:
        facts: device, versions, commit and environment variables.
        asked: implementations to run.
        cases: number of cases per implementation.
        rows: finished cases.
        running: current (implementation, case); None between two cases.
    """

    facts: dict[str, Any]
    asked: tuple[str, ...]
    cases: int
    rows: tuple[ConformanceRow, ...] = ()
    running: tuple[str, str] | None = None

    @property
    def complete(self) -> bool:
        """Whether all cases have finished."""
        return len(self.rows) == len(self.asked) * self.cases

    @property
    def healthy(self) -> bool:
        """Whether no case failed and every implementation passed at least one."""
        passed = {row.implementation for row in self.rows if row.verdict == "passed"}
        no_failure = all(row.verdict != "failed" for row in self.rows)
        return self.complete and no_failure and passed == set(self.asked)

    def filter(self, implementation: str, verdict: Verdict) -> list[ConformanceRow]:
        """Return the rows of one implementation with one verdict."""
        return [
            row
            for row in self.rows
            if (row.implementation, row.verdict) == (implementation, verdict)
        ]

    def to_json(self) -> str:
        """Serialize the report."""
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
class ConformanceProgress:
    """Progress event at the start of a case (`row` is None) or at its end."""

    number: int
    total: int
    implementation: str
    case: str
    elapsed_seconds: float
    row: ConformanceRow | None = None


def run_conformance(
    names: Iterable[str],
    keep: Callable[[ConformanceReport], None],
    watch: Callable[[ConformanceProgress], None],
) -> ConformanceReport:
    """Run implementations through all cases; Ctrl-C returns the finished ones.

    Args:
        names: implementations that can run here.
        keep: called with the report before every case and at the end, so that the report survives
            a crash of the process.
        watch: called with every progress event.

    Returns:
        The final report.
    """
    report = ConformanceReport(_collect_environment(), tuple(names), len(CASES))
    start, total = time.perf_counter(), len(report.asked) * len(CASES)
    pairs = [(name, case) for name in report.asked for case in CASES]
    try:
        for number, (name, case) in enumerate(pairs, 1):
            report = dataclasses.replace(report, running=(name, case.name))
            keep(report)
            watch(ConformanceProgress(number, total, name, case.name, time.perf_counter() - start))
            row = _run_case(name, case)
            report = dataclasses.replace(report, rows=(*report.rows, row), running=None)
            watch(
                ConformanceProgress(
                    number, total, name, case.name, time.perf_counter() - start, row
                )
            )
    except KeyboardInterrupt:
        pass  # the report is marked as incomplete
    keep(report)
    return report


def _run_case(name: str, case: ConformanceCase) -> ConformanceRow:
    """Run one case; errors become rows."""
    start, checks = time.perf_counter(), []
    verdict: Verdict = "passed"
    words = None
    try:
        # The error budget assumes float32 products, which accelerators do not use by default.
        with jax.default_matmul_precision("highest"):
            checks = check_case(xsake.attention, case, name)
    except UnsupportedError as error:
        verdict, words = "declined", str(error.got or error.what)
    except Exception as error:  # noqa: BLE001 - any error on a new device is a result
        verdict, words = "failed", sanitize(f"{type(error).__name__}: {error}", {})
    broken = failures(checks)
    if broken:
        verdict, words = "failed", "; ".join(broken)
    arrays = tuple(_array_errors(judgement) for judgement in checks)
    seconds = round(time.perf_counter() - start, 3)
    return ConformanceRow(name, case.name, case.dtype, verdict, words, seconds, arrays)


def _array_errors(judgement: Judgement) -> dict[str, Any]:
    """Return the errors of one array as JSON types."""
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


def _collect_environment() -> dict[str, Any]:
    """Return software and device information, without host or user names."""
    here, device = environment(checkout_root()), jax.devices()[0]
    packages = ((each.name, each.version) for each in importlib.metadata.distributions())
    related = {name: x for name, x in packages if name and name.startswith(("jax", "libtpu"))}
    return {
        "made_at": here.utc,
        "commit": here.commit,
        "dirty": here.dirty,
        "source": source_digest(),
        "versions": dict(sorted({**related, **here.versions}.items())),
        "platform": dispatch.default_platform(),
        "platform_version": sanitize(device.client.platform_version, {}),
        "device_kind": device.device_kind,
        "devices": len(jax.devices()),
        "host_processor": here.cpu,
        "settings": {
            name: sanitize(os.environ[name], {}) for name in VARIABLES if name in os.environ
        },
        "implementations": OP.implementations(),
    }


def main(implementation: str | None, path: Path | None, as_json: bool) -> int:
    """Run the command and return its exit code.

    Args:
        implementation: name of the one to run; None for all that can run here.
        path: output; default: a file named after the platform.
        as_json: print the report as JSON.
    """
    known = OP.implementations()
    runnable = [name for name, reason in known.items() if reason is None]
    if implementation is not None and implementation not in runnable:
        reason = known.get(implementation, f"unknown name, expected one of {', '.join(known)}")
        typer.echo(f"{implementation} cannot run here: {reason}", err=True)
        return CANNOT_RUN
    path = path or Path(f"xsake-kernels-{dispatch.default_platform()}.json")
    names = runnable if implementation is None else [implementation]
    console = rich.console.Console(quiet=as_json)
    try:
        with ConformanceProgressBar(console) as bar:
            report = run_conformance(
                names, lambda report: atomic_write(path, report.to_json()), bar.show
            )
    except OSError as error:
        typer.echo(f"Cannot write the report: {error}", err=True)
        return CANNOT_RUN
    if as_json:
        typer.echo(report.to_json(), nl=False)
    console.print(render(report, path))
    return INTERRUPTED if not report.complete else int(not report.healthy)


class ConformanceProgressBar(ProgressBar):
    """Progress bar on a terminal; otherwise one line per case. Failures are always printed."""

    def show(self, step: ConformanceProgress) -> None:
        """Show a progress event."""
        row, label = step.row, f"{step.implementation} {step.case}"
        done = step.number - (row is None)
        self.update(done, step.total, label)
        if row is not None and (row.verdict == "failed" or not self.console.is_terminal):
            style = {"failed": "bold red", "declined": "yellow", "passed": "green"}[row.verdict]
            self.console.print(
                f"{step.number} of {step.total}, {step.elapsed_seconds:.0f} s: {label} "
                f"[{style}]{row.verdict}[/]"
            )


def render(report: ConformanceReport, path: Path) -> rich.console.RenderableType:
    """Render a table, the reasons of failed or declined cases, and the path of the report."""
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
    for row in (row for name in report.asked for row in report.filter(name, "failed")):
        first, *_ = (row.words or "").splitlines() or [""]
        parts.append(f"[bold red]{row.implementation} {row.case}:[/] {escape(first)}")
    for name in report.asked:
        for reason, cases in _group_by_reason(report.filter(name, "declined")).items():
            text = f"{name} declined {len(cases)}: {reason} ({', '.join(cases)})"
            parts.append(f"[yellow]{escape(text)}[/]")
    for name, reason in facts["implementations"].items():
        if reason is not None:
            parts.append(f"[dim]{escape(f'{name} cannot run here: {reason}')}[/]")
    if not report.complete:
        total = len(report.asked) * report.cases
        parts.append(f"[bold yellow]Interrupted after {len(report.rows)} of {total}.[/]")
    parts.append(f"The report is in {escape(str(path))}. Please attach it to an issue.")
    return rich.console.Group(*parts)


def _counts(report: ConformanceReport, name: str) -> list[str]:
    passed, failed, declined = (len(report.filter(name, verdict)) for verdict in VERDICTS)
    return [str(passed), f"[bold red]{failed}[/]" if failed else "0", str(declined)]


def _worst(report: ConformanceReport, name: str) -> list[str]:
    """Return the largest ratio of error to allowance, and its case."""
    rows = [row for row in report.rows if row.implementation == name and row.used is not None]
    if not rows:
        return ["", ""]
    worst = max(rows, key=lambda row: row.used or 0.0)
    return [f"{worst.used:.0%}", worst.case]


def _group_by_reason(rows: Iterable[ConformanceRow]) -> dict[str, list[str]]:
    """Group cases by the reason for declining them."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row.words or ""].append(row.case)
    return dict(groups)
