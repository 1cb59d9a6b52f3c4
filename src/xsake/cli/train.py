"""`xsake train`: its arguments, progress line and exit codes; the work is done elsewhere."""

from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.markup import escape

from xsake._io import require_local
from xsake.cli.exits import exit_codes
from xsake.cli.screen import MovingLine
from xsake.errors import ArgumentError


def run_train(
    config: Annotated[Path, typer.Argument(help="The run, as TOML.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value, such as optimizer.accumulation=4."),
    ] = None,
    heartbeat_seconds: Annotated[
        int, typer.Option(min=1, help="A process that is silent for so long is dead.")
    ] = 10,
    profile: Annotated[
        str | None, typer.Option(help="Trace these steps, such as steps=10:15.")
    ] = None,
    take_lock: Annotated[
        bool, typer.Option("--take-lock", help="Take the folder from a run that holds it.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Print every setting as JSON and train nothing.")
    ] = False,
) -> None:
    """Train a model, or go on with a run that was stopped: the same command does both.

    Writes checkpoints, metrics.jsonl and goodput.jsonl into checkpoint.folder. SIGTERM and Ctrl-C
    save first. Exit code 0 if all steps are done, 2 if the run cannot be made, 75 if it was stopped
    and wants to be started again. Several processes: `xsake launch`.
    """
    console = rich.console.Console()
    with exit_codes():
        from xsake.observability.profiler import StepRange
        from xsake.training.config import TrainingConfig

        require_local(config)
        steps = None if profile is None else StepRange.parse(profile)
        made = TrainingConfig.read(config, setting or ())
        if check:
            typer.echo(made.to_json(), nl=False)
            return
        from xsake.training import processes
        from xsake.training.stopping import RESTART_ME
        from xsake.training.train import Ending, train

        processes.start(heartbeat_seconds=heartbeat_seconds)
        with _Screen(console, "loading, compiling") as screen:
            ending = train(made, watch=screen.show, profile=steps, is_lock_forced=take_lock)
    if ending is Ending.STOPPED:
        console.print("stopped; all is saved, and the same command goes on")
        raise typer.Exit(code=RESTART_ME)
    if processes.is_first():
        _show_goodput(console, made.checkpoint.folder / "goodput.jsonl")


def _show_goodput(console: rich.console.Console, path: Path) -> None:
    """Print where the time went; the run is complete, whatever has become of the file."""
    from xsake.observability.goodput import report, table

    try:
        console.print(table(report(path)))
    except ArgumentError as error:
        typer.echo(f"Goodput is not known: {error.what}, {error.got}", err=True)


class _Screen(MovingLine):
    """Progress: one moving line on a terminal, a line per told step elsewhere."""

    def show(self, progress: Any) -> None:
        """A step is done."""
        speed = f"{progress.tokens_per_second:,.0f} tokens/s"
        words = f"loss {progress.loss:.4f}, {speed}"
        words += ", skipped" if progress.is_skipped else ""
        words += f", {progress.budget:.0%} of blocks" if progress.budget not in (None, 1.0) else ""
        words += f", about {progress.remaining_seconds:.0f} s to go"
        if progress.note:
            words += f", {escape(progress.note)}"
        self.update(progress.step + 1, progress.steps, words)
        if not self.console.is_terminal:
            line = f"step {progress.step + 1} of {progress.steps}: {words}"
            self.console.print(line, soft_wrap=True, highlight=False)
