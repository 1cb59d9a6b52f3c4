"""`xsake bench training`: its arguments and its table; steps are made and timed elsewhere."""

from pathlib import Path
from typing import Annotated

import rich.console
import typer

from xsake.cli.cores import Threads, keep_to
from xsake.cli.exits import exit_codes
from xsake.cli.screen import MovingLine
from xsake.errors import ArgumentError


def run_training(
    configs: Annotated[list[Path], typer.Argument(help="Runs as TOML; the first is the measure.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another value for all of them, such as data.batch=2."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds; a step of each run.")] = 9,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Rows are added to this file.")
    ] = None,
) -> None:
    """Whole training steps of several runs, in turn: what another attention does to the step.

    Tokens are drawn at random, and nothing is saved: no data is needed.
    """
    console = rich.console.Console()
    with exit_codes():
        names = [path.stem for path in configs]
        if len(set(names)) < len(names):
            raise ArgumentError(
                "runs are called after their files", got=", ".join(names), expected="other names"
            )
        cores = keep_to(threads)
        from xsake.bench import append_rows, rows_table
        from xsake.bench.training_step import race
        from xsake.training.config import TrainingConfig

        runs = {path.stem: TrainingConfig.read(path, setting or ()) for path in configs}
        with MovingLine(console, "compiling") as line:
            rows = race(
                runs, rounds=rounds, threads=cores,
                watch=lambda done, total: line.update(done, total, "compiling, timing"),
            )  # fmt: skip
        if out is not None:
            append_rows(out, rows)
    if not console.is_terminal:
        console.width = 160
    console.print(rows_table(rows, title=f"training steps, {cores} cores"))
    for row in rows:
        assert row.seconds is not None, "every side was timed"
        rate = row.shape.batch * row.shape.q_tokens / row.seconds.median
        console.print(f"{row.side}: {rate:,.0f} tokens a second", highlight=False)
