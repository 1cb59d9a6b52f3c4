"""`xsake train`, `xsake launch` and `xsake profile`: training runs, their processes and traces."""

from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake._io import require_local
from xsake.cli.errors import exit_codes
from xsake.cli.options import App
from xsake.cli.progress import ProgressBar, echo
from xsake.errors import ArgumentError

_RESET = "Reset the failure count after this many healthy seconds."
_SETTING = "Override a value, such as optimizer.grad_accum_steps=4."
_HEARTBEAT = "Seconds without a heartbeat until a process counts as dead."

profile_app = App(no_args_is_help=True)


def run_train(
    config: Annotated[Path, typer.Argument(help="Run configuration (TOML).")],
    setting: Annotated[list[str] | None, typer.Option("--set", help=_SETTING)] = None,
    heartbeat_seconds: Annotated[int, typer.Option(min=1, help=_HEARTBEAT)] = 10,
    profile: Annotated[
        str | None, typer.Option(help="Profile these steps, such as steps=10:15.")
    ] = None,
    take_lock: Annotated[
        bool, typer.Option("--take-lock", help="Take over the lock of another run.")
    ] = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the resolved configuration and exit.")
    ] = False,
) -> None:
    """Train a model; the same command resumes an interrupted run.

    Writes checkpoints, metrics.jsonl and goodput.jsonl to checkpoint.folder. SIGTERM and Ctrl-C
    save a checkpoint first. Exit code 0 if all steps are done, 2 if the run cannot start, 75 if it
    was stopped and should be restarted. Use `xsake launch` for several processes.
    """
    console = rich.console.Console()
    with exit_codes():
        from xsake.observability.profiler import StepRange
        from xsake.training.config import TrainingConfig

        require_local(config)
        steps = None if profile is None else StepRange.parse(profile)
        run = TrainingConfig.read(config, setting or ())
        if print_config:
            typer.echo(run.to_json(), nl=False)
            return
        from xsake.training import processes
        from xsake.training.preemption import EXIT_RESTART
        from xsake.training.train import RunStatus, train

        processes.start(heartbeat_seconds=heartbeat_seconds)
        with ProgressBar(console, "loading, compiling", item="step") as bar:
            ending = train(run, on_progress=bar.show, profile=steps, is_lock_forced=take_lock)
    if ending is RunStatus.STOPPED:
        console.print("stopped; a checkpoint is saved, and the same command resumes the run")
        raise typer.Exit(code=EXIT_RESTART)
    if processes.is_primary():
        _show_goodput(console, run.checkpoint.folder / "goodput.jsonl")


def _show_goodput(console: rich.console.Console, path: Path) -> None:
    """Print the goodput table; a damaged file only prints a message."""
    from xsake.observability.goodput import goodput_table, read_goodput

    try:
        console.print(goodput_table(read_goodput(path)))
    except ArgumentError as error:
        typer.echo(f"Cannot report goodput: {error.what}, {error.got}", err=True)


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
