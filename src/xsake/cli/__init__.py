"""The `xsake` command: parses arguments, calls the library and prints; decides nothing itself."""

import json
from typing import Annotated

import rich
import typer

import xsake
from xsake.cli import doctor

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="markdown")


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(xsake.__version__)
        raise typer.Exit
    return wanted


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it."),
    ] = False,
) -> None:
    """Block-sparse attention for JAX: tools around the library."""


@app.command("doctor")
def run_doctor(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else.")
    ] = False,
) -> None:
    """Show what can run on this machine, and prove it with a one-second self-test.

    Exit code 0 if the self-test passes, 1 if it does not.
    """
    report = doctor.examine()
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        rich.print(doctor.render(report))
    if not report.healthy:
        raise typer.Exit(code=1)
