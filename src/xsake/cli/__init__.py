"""The `xsake` command line."""

from typing import Annotated

import typer

import xsake
from xsake.cli.audit import run_audit
from xsake.cli.bench import bench_app
from xsake.cli.calibrate import run_calibrate
from xsake.cli.certify import run_certify
from xsake.cli.data import data_app
from xsake.cli.doctor import run_doctor
from xsake.cli.evaluate import run_evaluate
from xsake.cli.export import run_export
from xsake.cli.generate import run_generate
from xsake.cli.options import App
from xsake.cli.plan import plan_app, run_report
from xsake.cli.serve import run_serve
from xsake.cli.train import profile_app, run_launch, run_train

__all__ = ["app"]

app = App(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")
app.command("audit")(run_audit)
app.command("calibrate")(run_calibrate)
app.command("certify")(run_certify)
app.command("evaluate")(run_evaluate)
app.command("export")(run_export)
app.command("generate")(run_generate)
app.command("launch", context_settings={"allow_interspersed_args": False})(run_launch)
app.command("report")(run_report)
app.command("serve")(run_serve)
app.command("train")(run_train)
app.command("doctor")(run_doctor)
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
