"""`xsake train`: train a model, or resume a run."""

from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake._io import require_local
from xsake.cli.errors import exit_codes
from xsake.cli.progress import ProgressBar
from xsake.errors import ArgumentError

_SETTING = "Override a value, such as optimizer.grad_accum_steps=4."
_HEARTBEAT = "Seconds without a heartbeat until a process counts as dead."


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
