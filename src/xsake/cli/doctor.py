"""`xsake doctor`: versions, devices and self-tests; with --kernels the conformance suite."""

import collections
import functools
import importlib.metadata
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import typer

import xsake
from xsake._io import atomic_write
from xsake.cli.errors import CANNOT_RUN, FAILED, INTERRUPTED
from xsake.cli.options import AsJson
from xsake.cli.progress import ProgressBar, escape_markup
from xsake.errors import XsakeError
from xsake.kernels import dispatch
from xsake.kernels.block_sparse.api import OP
from xsake.masks import Causal

# The absolute float32 limit of the numerics standard for gradients of unit-variance inputs.
MAX_ERROR = 1e-5
PACKAGES = (
    "jax",
    "jaxlib",
    "numpy",
    "jaxtyping",
    "pydantic",
    "flax",
    "equinox",
    "jinja2",
    "matplotlib",
)


def run_doctor(
    as_json: AsJson = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Run the conformance suite and write a report.")
    ] = False,
    implementation: Annotated[
        str | None, typer.Option(help="With --kernels: run only this one.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--report", help="With --kernels: default xsake-kernels-PLATFORM.json."),
    ] = None,
) -> None:
    """Show versions, devices and available implementations, and run a one-second self-test.

    Exit code 0 if the self-test passes, 1 if it fails.

    With --kernels: run the conformance suite, gradients included, for every implementation on this
    device (minutes) and write a report. Exit code 1 if a case fails, 2 if the suite cannot run,
    130 after Ctrl-C; finished cases are kept.
    """
    if kernels:
        raise typer.Exit(code=_check_kernels(implementation, file, as_json))
    if implementation is not None or file is not None:
        raise typer.BadParameter("--implementation and --report need --kernels")
    report = collect_report()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        rich.console.Console().print(_report_table(report))
    if not report["healthy"]:
        raise typer.Exit(code=FAILED)


class SelfTest(NamedTuple):
    """Comparison of one implementation with the reference; `problem` is None if it passed."""

    implementation: str
    max_error: float | None  # None if no result is finite
    seconds: float
    problem: str | None


def collect_report() -> dict[str, Any]:
    """Collect the report as JSON types; run each available implementation once on small inputs.

    A version is None for a library that is not installed, the reason of an implementation is None
    if it can run here. It is healthy if at least one self-test ran and none failed.
    """
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    versions = {"xsake": xsake.__version__, "python": platform.python_version()}
    implementations = OP.implementations()
    available = [name for name, reason in implementations.items() if reason is None]
    libraries = {name: OP.spec(name).describe_library() for name in available}
    tests = run_self_tests(available)
    return {
        "healthy": bool(tests) and all(test.problem is None for test in tests),
        "versions": versions | {name: installed.get(name) for name in PACKAGES},
        "backend": jax.default_backend(),
        "devices": [f"{device} ({device.device_kind})" for device in jax.devices()],
        "implementations": implementations,
        "libraries": {name: text for name, text in libraries.items() if text is not None},
        "compilation_cache": find_compilation_cache(),
        "self_tests": [test._asdict() for test in tests],
    }


def find_compilation_cache() -> dict[str, Any]:
    """Return JAX's cache directory, None if off, and whether it is writable, None if unknown."""
    directory = jax.config.jax_compilation_cache_dir or None
    if directory is None or "://" in directory:
        return {"directory": directory, "writable": None}
    existing = Path(directory).absolute()
    while not existing.exists():
        existing = existing.parent
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return {"directory": directory, "writable": writable}


@functools.partial(jax.jit, static_argnames="implementation")
def forward_and_gradients(q, k, v, cotangent, *, implementation: Any) -> jax.Array:
    """Return output and gradients of a causal call, flattened."""

    def forward(q, k, v):
        return xsake.attention(q, k, v, mask=Causal(), implementation=implementation)

    out, backward = jax.vjp(forward, q, k, v)
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves((out, backward(cotangent)))])


def run_self_tests(names: list[str]) -> list[SelfTest]:
    """Compare implementations with the reference."""
    reference = _run("reference")
    runs = {name: reference if name == "reference" else _run(name) for name in names}
    return [_compare(name, *run, reference[0]) for name, run in runs.items()]


def _run(implementation: str) -> tuple[np.ndarray | str, float]:
    """Return results or an error message, and the seconds including compilation.

    Inputs have grouped heads and a length that is not a multiple of a block.
    """
    random, start = np.random.default_rng(0), time.perf_counter()
    inputs = [random.standard_normal((1, 200, heads, 32), np.float32) for heads in (4, 2, 2, 4)]
    try:
        with jax.default_matmul_precision("highest"):
            outputs = forward_and_gradients(*inputs, implementation=implementation)
            results = np.asarray(outputs)
    except (XsakeError, jax.errors.JaxRuntimeError) as error:
        results = str(error)
    return results, time.perf_counter() - start


def _compare(
    name: str, got: np.ndarray | str, seconds: float, expected: np.ndarray | str
) -> SelfTest:
    if isinstance(got, str):
        return SelfTest(name, None, seconds, got)
    if isinstance(expected, str):
        return SelfTest(name, None, seconds, f"no reference to compare with: {expected}")
    # NumPy, because XLA's maximum of many NaNs is -inf on CPU (jax 0.12.0.1), which would pass.
    max_error = float(np.max(np.abs(got - expected)))
    if not math.isfinite(max_error):
        return SelfTest(name, None, seconds, "NaN or infinity in the results")
    wrong = max_error > MAX_ERROR
    problem = f"{max_error:.1e} away from the reference, limit {MAX_ERROR:g}" if wrong else None
    return SelfTest(name, max_error, seconds, problem)


def _report_table(report: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(title="xsake doctor", show_header=False, title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    versions = report["versions"]
    table.add_row("versions", ", ".join(f"{name} {x}" for name, x in versions.items() if x))
    missing = ", ".join(name for name, x in versions.items() if not x)
    if missing:
        table.add_row("not installed", f"{missing} [dim](optional)[/]")
    devices = escape_markup(", ".join(report["devices"]))
    table.add_row("devices", f"{devices} [dim]on {report['backend']}[/]")
    directory, writable = report["compilation_cache"].values()
    states = {True: "[green]writable[/]", False: "[red]not writable[/]", None: "remote"}
    off = "off [dim](set jax_compilation_cache_dir to keep compiled code)[/]"
    cache = off if directory is None else f"{escape_markup(directory)} {states[writable]}"
    table.add_row("compilation cache", cache)
    table.add_section()
    tests = {test["implementation"]: test for test in report["self_tests"]}
    for name, reason in report["implementations"].items():
        text = f"[yellow]cannot run here:[/] {escape_markup(reason or '')}"
        if name in tests and tests[name]["problem"] is not None:
            text = f"[red]self-test failed:[/] {escape_markup(tests[name]['problem'])}"
        elif name in tests:
            numbers = "max error {max_error:.1e}, {seconds:.2f} s with compilation"
            numbers = numbers.format_map(tests[name])
            if name in report["libraries"]:
                numbers = f"{report['libraries'][name]}; {numbers}"
            text = f"[green]runs, self-test passed[/] [dim]({numbers})[/]"
        table.add_row(name, text)
    return table


def _check_kernels(implementation: str | None, path: Path | None, as_json: bool) -> int:
    """Run the conformance suite, write and print its report, and return the exit code."""
    from xsake.testing import report as conformance  # imports the oracles: only if needed

    known, here = OP.implementations(), dispatch.default_platform()
    names = [name for name, reason in known.items() if reason is None]
    if implementation is not None and implementation not in names:
        reason = known.get(implementation, f"unknown name, expected one of {', '.join(known)}")
        typer.echo(f"{implementation} cannot run here: {reason}", err=True)
        return CANNOT_RUN
    path = path or Path(f"xsake-kernels-{here}.json")
    console = rich.console.Console(quiet=as_json)
    try:
        with ProgressBar(console) as bar:
            report = conformance.run_conformance(
                xsake.attention,
                names if implementation is None else [implementation],
                conformance.collect_facts(here, known),
                lambda report: atomic_write(path, report.to_json()),
                lambda event: (bar.show if event.detail else bar.update)(event),
            )
    except OSError as error:
        typer.echo(f"Cannot write the report: {error}", err=True)
        return CANNOT_RUN
    if as_json:
        typer.echo(report.to_json(), nl=False)
    console.print(_conformance_table(report))
    for line in _conformance_notes(report):
        console.print(line)
    console.print(f"The report is in {escape_markup(path)}. Please attach it to an issue.")
    return INTERRUPTED if not report.complete else int(not report.healthy)


def _conformance_table(report: Any) -> rich.table.Table:
    title = f"xsake doctor --kernels on {report.facts['platform']} ({report.facts['device_kind']})"
    table = rich.table.Table(title=title, title_justify="left")
    table.add_column("implementation")
    for name in ("passed", "failed", "declined", "allowance used"):
        table.add_column(name, justify="right")
    table.add_column("in case", overflow="fold")
    for name, counts in report.summary().items():
        failed = f"[bold red]{counts['failed']}[/]" if counts["failed"] else "0"
        rows = [row for row in report.rows if row.implementation == name and row.used is not None]
        worst = max(rows, key=lambda row: row.used, default=None)
        used = ("", "") if worst is None else (f"{worst.used:.0%}", worst.case)
        table.add_row(name, str(counts["passed"]), failed, str(counts["declined"]), *used)
    return table


def _conformance_notes(report: Any) -> list[str]:
    """Return failures, reasons for declined cases, and implementations that cannot run here."""
    lines, declined = [], collections.defaultdict(list)
    for row in report.rows:
        if row.verdict == "failed":
            first, *_ = (row.words or "").splitlines() or [""]
            lines.append(f"[bold red]{row.implementation} {row.case}:[/] {escape_markup(first)}")
        elif row.verdict == "declined":
            declined[row.implementation, row.words].append(row.case)
    for (name, reason), cases in declined.items():
        text = f"{name} declined {len(cases)}: {reason} ({', '.join(cases)})"
        lines.append(f"[yellow]{escape_markup(text)}[/]")
    for name, reason in report.facts["implementations"].items():
        if reason is not None:
            lines.append(f"[dim]{escape_markup(f'{name} cannot run here: {reason}')}[/]")
    if not report.complete:
        total = len(report.asked) * report.cases
        lines.append(f"[bold yellow]Interrupted after {len(report.rows)} of {total}.[/]")
    return lines
