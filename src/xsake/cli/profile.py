"""`xsake profile`: where the traces of a run are, and what opens them."""

from pathlib import Path
from typing import Annotated

import typer

from xsake.cli.exits import exit_codes
from xsake.cli.screen import echo
from xsake.errors import ArgumentError

profile_app = typer.Typer(no_args_is_help=True)


@profile_app.callback()
def about() -> None:
    """Look at what `xsake train --profile` has traced."""


@profile_app.command("open")
def open_profile(
    run: Annotated[Path, typer.Argument(help="Folder of the run (its checkpoint.folder).")],
) -> None:
    """Say where the traces of a run are and how to look at them; starts nothing itself.

    Exit code 0, or 2 if the run has none.
    """
    from xsake.observability.profiler import FOLDER, traces

    with exit_codes():
        found = traces(run)
        if not found:
            raise ArgumentError(
                "the run has no trace",
                got=run,
                expected=f"a folder with {FOLDER}/plugins/profile in it",
                fix="make one: xsake train RUN.toml --profile steps=10:15",
            )
    for trace in found:
        echo(f"trace     {trace}")
    echo(f"xprof     pip install xprof && xprof --port 6006 {run / FOLDER}")
    for file in sorted(found[-1].glob("*.trace.json.gz")):
        echo(f"Perfetto  https://ui.perfetto.dev, Open trace file: {file}")
