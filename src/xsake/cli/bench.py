"""`xsake bench`: its arguments, its progress and its tables; the work is done elsewhere."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.table import Table

from xsake.cli.bench_quality import run_quality
from xsake.cli.bench_training import run_training
from xsake.cli.cores import Threads, keep_to
from xsake.cli.exits import exit_codes
from xsake.cli.screen import MovingLine
from xsake.errors import ArgumentError

bench_app = typer.Typer(no_args_is_help=True, help="Measure attention on this machine.")
bench_app.command("quality")(run_quality)
bench_app.command("training")(run_training)
STOPPED = "Interrupted. Rows of lengths that were done are in the file."
_Shape = Annotated[str, typer.Option(help="Heads of a model: square, smollm2-135m, ...")]
_Tokens = Annotated[str, typer.Option(help="Lengths, with commas.")]
_Budgets = Annotated[str, typer.Option(help="Shares of the visible blocks, with commas.")]
_Block = Annotated[int, typer.Option(min=1, help="Tokens of a block.")]
_Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
_Rounds = Annotated[int, typer.Option(min=1, help="Timed rounds; all sides in each.")]
_Tiles = Annotated[Path | None, typer.Option(help="Tile sizes, as `xsake bench tune` writes.")]
_Trace = Annotated[Path | None, typer.Option(help="Trace one call of each side into this folder.")]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Rows are added to this file.")]


def _passes(kind: str, words: str) -> None:
    """A command that times whole passes."""

    def run(
        shape: _Shape = "square",
        tokens: _Tokens = "1024,4096",
        budgets: _Budgets = "43%,25%",
        block: _Block = 128,
        dtype: _Dtype = "float32",
        rounds: _Rounds = 9,
        threads: Threads = None,
        tiles: _Tiles = None,
        out: _Out = None,
        trace: _Trace = None,
    ) -> None:
        _run(
            kind,
            _Asked(shape, tokens, dtype, out, budgets, block, rounds, threads, tiles, trace),
        )

    bench_app.command(kind, help=words)(run)


_passes("attention", "Forward passes: all visible blocks, some of them, and jax.nn, in turn.")
_passes("backward", "Forward and backward passes together.")


@bench_app.command("decode")
def run_decode(
    shape: _Shape = "square",
    tokens: _Tokens = "1024,4096,16384",
    dtype: _Dtype = "float32",
    rounds: _Rounds = 25,
    threads: Threads = None,
    out: _Out = None,
) -> None:
    """One new token that looks at a cache of so many."""
    _run("decode", _Asked(shape, tokens, dtype, out, rounds=rounds, threads=threads))


@bench_app.command("memory")
def run_memory(
    shape: _Shape = "square",
    tokens: _Tokens = "4096,8192,16384",
    budgets: _Budgets = "25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    out: _Out = None,
) -> None:
    """Temporary memory that the compiler plans for both passes; nothing is run."""
    _run("memory", _Asked(shape, tokens, dtype, out, budgets, block))


@bench_app.command("growth")
def run_growth(
    shape: _Shape = "square",
    tokens: _Tokens = "1024,2048,4096,8192,16384",
    budget: Annotated[str, typer.Option(help="Share of the visible blocks.")] = "25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    rounds: _Rounds = 5,
    threads: Threads = None,
    out: _Out = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it into this PNG.")] = None,
) -> None:
    """How the time of a forward pass grows with its length, and where lines cross."""
    rows = _run("attention", _Asked(shape, tokens, dtype, out, budget, block, rounds, threads))
    from xsake.bench.growth import growths
    from xsake.bench.plot import draw_growth

    with exit_codes(STOPPED):
        found = growths(rows)
        table = Table("side", "grows as", "largest residual", title="Growth", title_justify="left")
        for each in found:
            table.add_row(each.side, f"tokens^{each.exponent:.2f}", f"{each.largest_residual:.0%}")
        rich.console.Console().print(table)
        if plot is not None:
            draw_growth(found, rows, plot)


@bench_app.command("tune")
def run_tune(
    shape: _Shape = "square",
    tokens: _Tokens = "4096",
    budgets: _Budgets = "100%,25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    backward: Annotated[bool, typer.Option(help="Time gradients too.")] = False,
    rounds: _Rounds = 9,
    threads: Threads = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Findings are added to this file.")] = (
        Path("tuned.json")
    ),
) -> None:
    """Search tile sizes for calls of this size: they change the time, never the result.

    Use them with `xsake.kernels.tuning.pinned(load_here(path))`, or `xsake bench --tiles`.
    """
    console = rich.console.Console()
    with exit_codes(STOPPED):
        keep_to(threads)
        from xsake.bench import shape_of
        from xsake.bench.measure import grid_of
        from xsake.bench.tuned_file import TunedFile
        from xsake.bench.tuner import search

        known = TunedFile.loads(out.read_text()) if out.exists() else TunedFile.of(())
        for length in map(_number, tokens.split(",")):
            for share in map(_share, budgets.split(",")):
                asked = shape_of(shape, length)
                grid = grid_of(asked, share, block, 0)
                with MovingLine(console, f"{length} tokens, {share:.0%}") as line:
                    found = search(
                        asked, grid, block=block, dtype=dtype, is_backward=backward, rounds=rounds,
                        watch=lambda done, total, line=line: line.update(done, total, "compiling"),
                    )  # fmt: skip
                words = "nothing is faster than the backend's own sizes"
                if found.call is not None:
                    known = known.merged((found.call,))
                    known.save(out)
                    words = f"{found.best}: {found.speedup.describe()} of the speed before"
                console.print(f"{length} tokens, {share:.0%}, {found.tried} sizes: {words}")


@bench_app.command("report")
def run_report(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page.")] = Path("bench.html"),
) -> None:
    """One HTML page of what was measured; it needs no network and no other file."""
    from xsake._io import atomic_write
    from xsake.bench import read_rows
    from xsake.bench.report import page

    with exit_codes(STOPPED):
        found = [row for path in rows for row in read_rows(path)]
        if not found:
            raise ArgumentError("there is nothing to show", got="no row", expected="xsake bench -o")
        atomic_write(out, page(found))
    rich.console.Console().print(f"{len(found)} rows, written to {out}", highlight=False)


@bench_app.command("compare")
def run_compare(
    before: Annotated[Path, typer.Argument(help="Rows of an earlier run.")],
    after: Annotated[Path, typer.Argument(help="Rows of a later run.")],
    limit: Annotated[float, typer.Option(help="Slower by more than this fails.")] = 1.1,
) -> None:
    """Which sides became slower, each held against the bare product of its own run.

    Exit code 1 if a side is slower by more than the limit, even by its better quartile.
    """
    from xsake.bench import read_rows
    from xsake.bench.compare import changes

    with exit_codes(STOPPED):
        found = changes(read_rows(before), read_rows(after))
        if not found:
            raise ArgumentError("no side is in both files", got=f"{before} and {after}")
    table = Table("experiment", "side", "size", "after / before", "verdict")
    for change in found:
        verdict = "unclear" if not change.is_clear else "same or faster"
        if change.is_slower(limit):
            verdict = "[red]slower[/]"
        told = change.factor
        words = f"{told.median:.3f} [{told.q25:.3f}, {told.q75:.3f}]"
        table.add_row(change.experiment, change.side, change.size, words, verdict)
    rich.console.Console().print(table)
    if any(change.is_slower(limit) for change in found):
        raise typer.Exit(code=1)


@dataclasses.dataclass(frozen=True)
class _Asked:
    """What a command was told, in its own words."""

    shape: str
    tokens: str
    dtype: str
    out: Path | None
    budgets: str = "100%"
    block: int = 128
    rounds: int = 1
    threads: int | None = None
    tiles: Path | None = None
    trace: Path | None = None

    def settings(self, cores: int) -> Any:
        from xsake.bench.measure import Settings
        from xsake.bench.spot_check import TOLERANCE

        if self.dtype not in TOLERANCE:
            expected = ", ".join(TOLERANCE)
            raise ArgumentError("there is no such dtype", got=self.dtype, expected=expected)
        lengths = tuple(map(_number, self.tokens.split(",")))
        shares = tuple(map(_share, self.budgets.split(",")))
        return Settings(
            self.shape, lengths, shares, self.block, self.dtype, self.rounds, cores,
            trace=self.trace,
        )  # fmt: skip


def _run(kind: Any, asked: _Asked) -> list[Any]:
    """Measure, show and keep rows."""
    console = rich.console.Console()
    with exit_codes(STOPPED):
        cores = keep_to(asked.threads)
        from xsake.bench import append_rows, rows_table
        from xsake.bench.measure import measure
        from xsake.bench.tuned_file import load_here
        from xsake.kernels.tuning import TileTable, pinned

        settings = asked.settings(cores)
        table = TileTable() if asked.tiles is None else load_here(asked.tiles)
        lengths = settings.tokens
        with MovingLine(console, f"{kind}, {lengths[0]} tokens") as line, pinned(table):

            def show(done: int, rows: list[Any]) -> None:
                if asked.out is not None:
                    append_rows(asked.out, rows)
                following = f"{kind}, {lengths[min(done, len(lengths) - 1)]} tokens"
                line.update(done, len(lengths), following)

            rows = measure(kind, settings, show)
    if not console.is_terminal:
        console.width = 160
    console.print(rows_table(rows, title=f"{kind}, {asked.shape}, {asked.dtype}, {cores} cores"))
    for file in sorted(asked.trace.rglob("perfetto_trace.json.gz")) if asked.trace else ():
        console.print(f"https://ui.perfetto.dev, Open trace file: {file}", highlight=False)
    if any(row.is_correct is False for row in rows):
        raise typer.Exit(code=1)
    return rows


def _number(word: str) -> int:
    try:
        number = int(word)
    except ValueError as error:
        raise ArgumentError("--tokens takes numbers", got=word, expected="1024,4096") from error
    if number < 1:
        raise ArgumentError("a sequence has tokens", got=word, expected="1 or more")
    return number


def _share(word: str) -> float:
    from xsake.cli.calibrate import share_of

    return share_of(word)
