"""`xsake profile`: list the profiler traces of a run."""

from pathlib import Path
from typing import Annotated

import typer

from xsake.cli.errors import exit_codes
from xsake.cli.options import App
from xsake.cli.progress import echo
from xsake.errors import ArgumentError

profile_app = App(no_args_is_help=True)


@profile_app.callback()  # a single command would otherwise have no name
def about() -> None:
    """List traces written by `xsake train --profile`."""


@profile_app.command("open", hidden=True)  # old name
@profile_app.command("show")
def show_traces(
    run: Annotated[Path, typer.Argument(help="Folder of the run (its checkpoint.folder).")],
) -> None:
    """Print the paths of a run's traces and the commands that open them.

    Exit code 0, or 2 if the run has no trace.
    """
    from xsake.observability.profiler import FOLDER, find_traces

    with exit_codes():
        folders = find_traces(run)
        if not folders:
            raise ArgumentError(
                "no-trace",
                "the run has no trace",
                got=run,
                expected=f"a folder with {FOLDER}/plugins/profile in it",
                fix="record one: xsake train RUN.toml --profile steps=10:15",
            )
    for folder in folders:
        echo(f"trace     {folder}")
    echo(f"xprof     pip install xprof && xprof --port 6006 {run / FOLDER}")
    for file in sorted(folders[-1].glob("*.trace.json.gz")):
        echo(f"Perfetto  https://ui.perfetto.dev, Open trace file: {file}")
