"""The `xsake` command line."""

import json
from pathlib import Path
from typing import Annotated

import rich
import typer

import xsake
from xsake.cli import doctor
from xsake.cli.aliases import App
from xsake.cli.bench import bench_app
from xsake.cli.calibrate import run_calibrate
from xsake.cli.certify import run_certify
from xsake.cli.data import data_app
from xsake.cli.evaluate import run_evaluate
from xsake.cli.export import run_export
from xsake.cli.generate import run_generate
from xsake.cli.launch import run_launch
from xsake.cli.plan import plan_app
from xsake.cli.profile import profile_app
from xsake.cli.report import run_report
from xsake.cli.serve import run_serve
from xsake.cli.train import run_train

__all__ = ["app"]

app = App(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
app.command("calibrate")(run_calibrate)
app.command("certify")(run_certify)
app.command("evaluate")(run_evaluate)
app.command("export")(run_export)
app.command("generate")(run_generate)
app.command("launch", context_settings={"allow_interspersed_args": False})(run_launch)
app.command("report")(run_report)
app.command("serve")(run_serve)
app.command("train")(run_train)
app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")
app.add_typer(plan_app, name="plan")
app.add_typer(profile_app, name="profile")


def _print_version(enabled: bool) -> bool:
    if enabled:
        typer.echo(xsake.__version__)
        raise typer.Exit
    return enabled


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Block-sparse attention for JAX."""


@app.command("doctor")
def run_doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
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
        from xsake.cli import kernel_report  # imports the oracles: only if needed

        raise typer.Exit(code=kernel_report.main(implementation, file, as_json))
    if implementation is not None or file is not None:
        raise typer.BadParameter("--implementation and --report need --kernels")
    report = doctor.collect_report()
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        rich.print(doctor.render(report))
    if not report.healthy:
        raise typer.Exit(code=1)
