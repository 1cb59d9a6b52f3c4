"""`xsake bench`: benchmark attention on this machine."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.table import Table

from xsake.cli.aliases import App
from xsake.cli.bench_quality import run_quality
from xsake.cli.bench_training import run_training
from xsake.cli.calibrate import parse_density
from xsake.cli.cores import NumThreads, set_cpu_affinity
from xsake.cli.exits import exit_codes
from xsake.cli.screen import ProgressBar
from xsake.errors import ArgumentError

bench_app = App(no_args_is_help=True, help="Benchmark attention on this machine.")
bench_app.command("quality")(run_quality)
bench_app.command("training")(run_training)
INTERRUPTED_MESSAGE = "Interrupted. Rows of finished lengths are in the file."
_Shape = Annotated[str, typer.Option(help="Attention shape of a model: square, smollm2-135m, ...")]
_Tokens = Annotated[str, typer.Option(help="Comma-separated sequence lengths.")]
_Densities = Annotated[str, typer.Option(help="Comma-separated shares of the visible blocks.")]
_Block = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
_Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
_Repeats = Annotated[int, typer.Option(min=1, help="Timed repeats, interleaved.")]
_Tiles = Annotated[Path | None, typer.Option(help="Tile sizes written by `xsake bench tune`.")]
_Trace = Annotated[Path | None, typer.Option(help="Trace one call per variant into this folder.")]
_Out = Annotated[Path | None, typer.Option("--out", "-o", help="Append rows to this file.")]


def _add_timing_command(experiment: str, text: str) -> None:
    """Register a command that times whole passes."""

    def run(
        shape: _Shape = "square",
        tokens: _Tokens = "1024,4096",
        densities: _Densities = "43%,25%",
        block: _Block = 128,
        dtype: _Dtype = "float32",
        repeats: _Repeats = 9,
        num_threads: NumThreads = None,
        tiles: _Tiles = None,
        out: _Out = None,
        trace: _Trace = None,
    ) -> None:
        arguments = _BenchArguments(
            shape, tokens, dtype, out, densities, block, repeats, num_threads, tiles, trace
        )
        _run(experiment, arguments)

    bench_app.command(experiment, help=text)(run)


_add_timing_command("attention", "Time forward passes: dense, sparse and jax.nn, interleaved.")
_add_timing_command("backward", "Time forward and backward passes together.")


@bench_app.command("decode")
def run_decode(
    shape: _Shape = "square",
    tokens: _Tokens = "1024,4096,16384",
    dtype: _Dtype = "float32",
    repeats: _Repeats = 25,
    num_threads: NumThreads = None,
    out: _Out = None,
) -> None:
    """Time the attention of one new token to a KV cache."""
    _run(
        "decode",
        _BenchArguments(shape, tokens, dtype, out, repeats=repeats, num_threads=num_threads),
    )


@bench_app.command("memory")
def run_memory(
    shape: _Shape = "square",
    tokens: _Tokens = "4096,8192,16384",
    densities: _Densities = "25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    out: _Out = None,
) -> None:
    """Report the compiler's temporary memory for both passes without running them."""
    _run("memory", _BenchArguments(shape, tokens, dtype, out, densities, block))


@bench_app.command("growth")
def run_growth(
    shape: _Shape = "square",
    tokens: _Tokens = "1024,2048,4096,8192,16384",
    budget: Annotated[str, typer.Option(help="Share of the visible blocks.")] = "25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    repeats: _Repeats = 5,
    num_threads: NumThreads = None,
    out: _Out = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot to this PNG.")] = None,
) -> None:
    """Fit how the time of a forward pass scales with sequence length."""
    arguments = _BenchArguments(shape, tokens, dtype, out, budget, block, repeats, num_threads)
    rows = _run("attention", arguments)
    from xsake.bench.growth import fit_growths
    from xsake.reports.bench_report import draw_growth

    with exit_codes(INTERRUPTED_MESSAGE):
        fits = fit_growths(rows)
        table = Table("side", "scales as", "largest residual", title="Growth", title_justify="left")
        for each in fits:
            table.add_row(each.side, f"tokens^{each.exponent:.2f}", f"{each.largest_residual:.0%}")
        rich.console.Console().print(table)
        if plot is not None:
            draw_growth(fits, rows, plot)


@bench_app.command("tune")
def run_tune(
    shape: _Shape = "square",
    tokens: _Tokens = "4096",
    densities: _Densities = "100%,25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    backward: Annotated[bool, typer.Option(help="Time gradients too.")] = False,
    repeats: _Repeats = 9,
    num_threads: NumThreads = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Add results to this file.")] = (
        Path("tuned.json")
    ),
) -> None:
    """Autotune tile sizes for calls of this size; results do not change.

    Use them by `xsake.kernels.tuning.pin_tiles(load_tuned_tiles(path))` or `xsake bench --tiles`.
    """
    console = rich.console.Console()
    with exit_codes(INTERRUPTED_MESSAGE):
        set_cpu_affinity(num_threads)
        from xsake.bench import model_shape
        from xsake.bench.measure import make_grid
        from xsake.bench.tuned_file import TunedFile
        from xsake.bench.tuner import search

        table = TunedFile.loads(out.read_text()) if out.exists() else TunedFile.of(())
        for length in map(_parse_length, tokens.split(",")):
            for density in map(parse_density, densities.split(",")):
                call = model_shape(shape, length)
                grid = make_grid(call, density, block, 0)
                with ProgressBar(console, f"{length} tokens, {density:.0%}") as bar:
                    best = search(
                        call, grid, block=block, dtype=dtype, is_backward=backward, rounds=repeats,
                        on_progress=lambda done, total, bar=bar: bar.update(
                            done, total, "compiling"
                        ),
                    )  # fmt: skip
                text = "the default tile sizes are fastest"
                if best.call is not None:
                    table = table.merge((best.call,))
                    table.save(out)
                    text = f"{best.best}: {best.speedup.describe()} of the default's speed"
                console.print(f"{length} tokens, {density:.0%}, {best.tried} sizes: {text}")


@bench_app.command("report")
def run_report(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output page.")] = Path("bench.html"),
) -> None:
    """Write measurements as a single self-contained HTML page."""
    from xsake._io import atomic_write
    from xsake.bench import read_rows
    from xsake.reports.bench_report import page

    with exit_codes(INTERRUPTED_MESSAGE):
        measurements = [row for path in rows for row in read_rows(path)]
        if not measurements:
            raise ArgumentError("the files hold no rows", expected="output of xsake bench -o")
        atomic_write(out, page(measurements))
    rich.console.Console().print(f"{len(measurements)} rows, written to {out}", highlight=False)


@bench_app.command("compare")
def run_compare(
    before: Annotated[Path, typer.Argument(help="Rows of an earlier run.")],
    after: Annotated[Path, typer.Argument(help="Rows of a later run.")],
    limit: Annotated[float, typer.Option(help="Largest accepted slowdown.")] = 1.1,
) -> None:
    """Compare two runs; times are normalized by each run's plain matmul.

    Exit code 1 if a variant is slower by more than the limit, even at its better quartile.
    """
    from xsake.bench import read_rows
    from xsake.bench.compare import compare_rows

    with exit_codes(INTERRUPTED_MESSAGE):
        compared = compare_rows(read_rows(before), read_rows(after))
        if not compared:
            raise ArgumentError("the files have no variant in common", got=f"{before} and {after}")
    table = Table("experiment", "side", "size", "after / before", "verdict")
    for change in compared:
        verdict = "unclear" if not change.is_clear else "same or faster"
        if change.is_slower(limit):
            verdict = "[red]slower[/]"
        factor = change.factor
        text = f"{factor.median:.3f} [{factor.q25:.3f}, {factor.q75:.3f}]"
        table.add_row(change.experiment, change.side, change.size, text, verdict)
    rich.console.Console().print(table)
    if any(change.is_slower(limit) for change in compared):
        raise typer.Exit(code=1)


@dataclasses.dataclass(frozen=True)
class _BenchArguments:
    """Unparsed arguments of a benchmark command."""

    shape: str
    tokens: str
    dtype: str
    out: Path | None
    densities: str = "100%"
    block: int = 128
    repeats: int = 1
    num_threads: int | None = None
    tiles: Path | None = None
    trace: Path | None = None

    def settings(self, cores: int) -> Any:
        from xsake.bench.measure import BenchSettings
        from xsake.bench.spot_check import TOLERANCE

        if self.dtype not in TOLERANCE:
            expected = ", ".join(TOLERANCE)
            raise ArgumentError("unknown dtype", got=self.dtype, expected=expected)
        lengths = tuple(map(_parse_length, self.tokens.split(",")))
        densities = tuple(map(parse_density, self.densities.split(",")))
        return BenchSettings(
            self.shape, lengths, densities, self.block, self.dtype, self.repeats, cores,
            trace=self.trace,
        )  # fmt: skip


def _run(experiment: Any, arguments: _BenchArguments) -> list[Any]:
    """Measure, print and append rows."""
    console = rich.console.Console()
    with exit_codes(INTERRUPTED_MESSAGE):
        cores = set_cpu_affinity(arguments.num_threads)
        from xsake.bench import append_rows, rows_table
        from xsake.bench.measure import measure
        from xsake.bench.tuned_file import load_tuned_tiles
        from xsake.kernels.tuning import TileTable, pin_tiles

        settings = arguments.settings(cores)
        table = TileTable() if arguments.tiles is None else load_tuned_tiles(arguments.tiles)
        lengths = settings.tokens
        with ProgressBar(console, f"{experiment}, {lengths[0]} tokens") as bar, pin_tiles(table):

            def show(done: int, rows: list[Any]) -> None:
                if arguments.out is not None:
                    append_rows(arguments.out, rows)
                following = f"{experiment}, {lengths[min(done, len(lengths) - 1)]} tokens"
                bar.update(done, len(lengths), following)

            rows = measure(experiment, settings, show)
    if not console.is_terminal:
        console.width = 160
    title = f"{experiment}, {arguments.shape}, {arguments.dtype}, {cores} cores"
    console.print(rows_table(rows, title=title))
    for file in sorted(arguments.trace.rglob("perfetto_trace.json.gz")) if arguments.trace else ():
        console.print(f"https://ui.perfetto.dev, Open trace file: {file}", highlight=False)
    if any(row.is_correct is False for row in rows):
        raise typer.Exit(code=1)
    return rows


def _parse_length(text: str) -> int:
    try:
        number = int(text)
    except ValueError as error:
        raise ArgumentError("invalid --tokens", got=text, expected="such as 1024,4096") from error
    if number < 1:
        raise ArgumentError("invalid --tokens", got=text, expected="at least 1")
    return number
