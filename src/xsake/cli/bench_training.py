"""`xsake bench training`: time whole training steps."""

from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake.cli.cores import NumThreads, set_cpu_affinity
from xsake.cli.exits import exit_codes
from xsake.cli.screen import ProgressBar
from xsake.errors import ArgumentError


def run_training(
    configs: Annotated[list[Path], typer.Argument(help="Runs (TOML); the first is the baseline.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a value in all runs, such as data.batch=2."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps per run.")] = 9,
    num_threads: NumThreads = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Append rows to this file.")
    ] = None,
) -> None:
    """Compare the time of whole training steps of several runs, interleaved.

    Uses random tokens and saves nothing, so no data is needed.
    """
    console = rich.console.Console()
    with exit_codes():
        names = [path.stem for path in configs]
        if len(set(names)) < len(names):
            raise ArgumentError(
                "runs are named after their files", got=", ".join(names), expected="unique names"
            )
        cores = set_cpu_affinity(num_threads)
        from xsake.bench import append_rows, rows_table
        from xsake.bench.training_step import time_steps
        from xsake.training.config import TrainingConfig

        runs = {path.stem: TrainingConfig.read(path, setting or ()) for path in configs}
        with ProgressBar(console, "compiling") as bar:
            rows = time_steps(
                runs, rounds=repeats, threads=cores,
                on_progress=lambda done, total: bar.update(done, total, "compiling, timing"),
            )  # fmt: skip
        if out is not None:
            append_rows(out, rows)
    if not console.is_terminal:
        console.width = 160
    console.print(rows_table(rows, title=f"training steps, {cores} cores"))
    for row in rows:
        assert row.seconds is not None, "every run was timed"
        rate = row.shape.batch * row.shape.q_tokens / row.seconds.median
        console.print(f"{row.side}: {rate:,.0f} tokens/s", highlight=False)
