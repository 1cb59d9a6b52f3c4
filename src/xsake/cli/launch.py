"""`xsake launch`: run a command in several processes, with restarts."""

from typing import Annotated

import typer

from xsake.cli.errors import exit_codes

_RESET = "Reset the failure count after this many healthy seconds."


def run_launch(
    command: Annotated[list[str], typer.Argument(help="Command to run, such as: xsake train ...")],
    processes: Annotated[int, typer.Option("--processes", "-n", help="Number of processes.")] = 1,
    max_restarts: Annotated[
        int, typer.Option(help="Maximum number of restarts after failures (exit code 75 is none).")
    ] = 3,
    grace_seconds: Annotated[
        float, typer.Option(help="Seconds to save and exit after a stop request.")
    ] = 30.0,
    reset_failures_after: Annotated[float | None, typer.Option(help=_RESET)] = None,
) -> None:
    """Run a command in several processes on this machine; restart all of them if one fails.

    Sets XSAKE_COORDINATOR, XSAKE_PROCESSES and XSAKE_PROCESS, and prefixes output lines with the
    process number. Ctrl-C and SIGTERM let processes save; a second Ctrl-C kills them. Exit code 0
    on success, 2 if the command cannot start, else the code of the last failure.
    """
    with exit_codes():
        from xsake.training.launch import RestartPolicy, launch

        policy = RestartPolicy(
            max_restarts=max_restarts,
            grace_seconds=grace_seconds,
            reset_failures_after=reset_failures_after,
        )
        code = launch(command, processes=processes, policy=policy)
    raise typer.Exit(code=code)
