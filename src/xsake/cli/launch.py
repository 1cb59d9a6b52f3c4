"""`xsake launch`: its arguments and its exit code; the processes are watched elsewhere."""

from typing import Annotated

import typer

from xsake.cli.exits import exit_codes

_HEALTHY = "A life that lasted so long makes up for all failures before it."


def run_launch(
    command: Annotated[list[str], typer.Argument(help="What to run, such as: xsake train ...")],
    processes: Annotated[int, typer.Option("--processes", "-n", help="How many.")] = 1,
    most_restarts: Annotated[int, typer.Option(help="After failures; code 75 is none.")] = 3,
    grace_seconds: Annotated[float, typer.Option(help="To save and end, when stopped.")] = 30.0,
    healthy_seconds: Annotated[float | None, typer.Option(help=_HEALTHY)] = None,
) -> None:
    """Run a command in several processes on this machine, and start all again when one dies.

    Each finds its place in XSAKE_COORDINATOR, XSAKE_PROCESSES and XSAKE_PROCESS, and its lines
    begin with its number. Ctrl-C and SIGTERM let them save; a second Ctrl-C kills them. Exit code 0
    if all end well, 2 if the command cannot be started, else the code of the last failure.
    """
    with exit_codes():
        from xsake.training.launch import Rules, launch

        rules = Rules(
            most_restarts=most_restarts,
            grace_seconds=grace_seconds,
            healthy_seconds=healthy_seconds,
        )
        code = launch(command, processes=processes, rules=rules)
    raise typer.Exit(code=code)
