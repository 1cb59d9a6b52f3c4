"""`xsake bench`: benchmark attention on this machine."""

import json
from pathlib import Path
from typing import Annotated, Any

import rich.console
import typer
from rich.table import Table

from xsake._io import atomic_write
from xsake.cli.errors import FAILED, exit_codes
from xsake.cli.load import (
    import_extra,
    load_eval_model,
    parse_density,
    parse_ints,
    set_cpu_affinity,
)
from xsake.cli.options import App, ModelFolder, NumThreads, PlotFile, RowsFile, TextFiles
from xsake.cli.progress import ProgressBar
from xsake.errors import ArgumentError

bench_app = App(no_args_is_help=True, help="Benchmark attention on this machine.")
_INTERRUPTED = "Interrupted. Rows of finished lengths are in the file."
_Shape = Annotated[str, typer.Option(help="Attention shape of a model: square, smollm2-135m, ...")]
_Tokens = Annotated[str, typer.Option(help="Comma-separated sequence lengths.")]
_Densities = Annotated[str, typer.Option(help="Comma-separated shares of the visible blocks.")]
_Block = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
_Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
_Repeats = Annotated[int, typer.Option(min=1, help="Timed repeats, interleaved.")]
_Tiles = Annotated[Path | None, typer.Option(help="Tile sizes written by `xsake bench tune`.")]
_Trace = Annotated[Path | None, typer.Option(help="Trace one call per variant into this folder.")]


def _add_timing_command(kind: str, text: str) -> None:
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
        out: RowsFile = None,
        trace: _Trace = None,
    ) -> None:
        _measure(
            kind, shape, tokens, dtype, out, densities=densities, block=block, repeats=repeats,
            num_threads=num_threads, tiles=tiles, trace=trace,
        )  # fmt: skip

    bench_app.command(kind, help=text)(run)


_add_timing_command("attention", "Time forward passes: dense, sparse and jax.nn, interleaved.")
_add_timing_command("backward", "Time forward and backward passes together.")


@bench_app.command("decode")
def run_decode(
    shape: _Shape = "square",
    tokens: _Tokens = "1024,4096,16384",
    dtype: _Dtype = "float32",
    repeats: _Repeats = 25,
    num_threads: NumThreads = None,
    out: RowsFile = None,
) -> None:
    """Time the attention of one new token to a KV cache."""
    _measure("decode", shape, tokens, dtype, out, repeats=repeats, num_threads=num_threads)


@bench_app.command("memory")
def run_memory(
    shape: _Shape = "square",
    tokens: _Tokens = "4096,8192,16384",
    densities: _Densities = "25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    out: RowsFile = None,
) -> None:
    """Report the compiler's temporary memory for both passes without running them."""
    _measure("memory", shape, tokens, dtype, out, densities=densities, block=block)


@bench_app.command("growth")
def run_growth(
    shape: _Shape = "square",
    tokens: _Tokens = "1024,2048,4096,8192,16384",
    budget: Annotated[str, typer.Option(help="Share of the visible blocks.")] = "25%",
    block: _Block = 128,
    dtype: _Dtype = "float32",
    repeats: _Repeats = 5,
    num_threads: NumThreads = None,
    out: RowsFile = None,
    plot: PlotFile = None,
) -> None:
    """Fit how the time of a forward pass scales with sequence length."""
    rows = _measure(
        "attention", shape, tokens, dtype, out, densities=budget, block=block, repeats=repeats,
        num_threads=num_threads,
    )  # fmt: skip
    from xsake.benchmarking.growth import fit_growths
    from xsake.reports.bench_report import draw_growth

    with exit_codes(_INTERRUPTED):
        fits = fit_growths(rows)
        table = Table("side", "scales as", "largest residual", title="Growth", title_justify="left")
        for each in fits:
            table.add_row(each.side, f"tokens^{each.exponent:.2f}", f"{each.largest_residual:.0%}")
        rich.console.Console().print(table)
        if plot is not None:
            draw_growth(fits, rows, plot)


def _measure(
    kind: Any, shape: str, tokens: str, dtype: str, out: Path | None, *, densities: str = "100%",
    block: int = 128, repeats: int = 1, num_threads: int | None = None, tiles: Path | None = None,
    trace: Path | None = None,
) -> list[Any]:  # fmt: skip
    """Measure, print and append rows."""
    console = rich.console.Console()
    with exit_codes(_INTERRUPTED):
        cores = set_cpu_affinity(num_threads)
        from xsake.benchmarking import append_rows, rows_table
        from xsake.benchmarking.measure import BenchSettings, measure
        from xsake.benchmarking.tuning import load_tuned_tiles
        from xsake.kernels.tuning import TileTable, pin_tiles

        lengths, shares = parse_ints("--tokens", tokens, 1), _parse_densities(densities)
        settings = BenchSettings(shape, lengths, shares, block, dtype, repeats, cores, trace=trace)
        keep = lambda rows: None if out is None else append_rows(out, rows)
        table = TileTable() if tiles is None else load_tuned_tiles(tiles)
        with ProgressBar(console) as bar, pin_tiles(table):
            rows = measure(kind, settings, keep=keep, on_progress=bar.update)
    if not console.is_terminal:
        console.width = 160
    console.print(rows_table(rows, title=f"{kind}, {shape}, {dtype}, {cores} cores"))
    for file in sorted(trace.rglob("perfetto_trace.json.gz")) if trace else ():
        console.print(f"https://ui.perfetto.dev, Open trace file: {file}", highlight=False)
    if any(row.is_correct is False for row in rows):
        raise typer.Exit(code=FAILED)
    return rows


def _parse_densities(text: str) -> tuple[float, ...]:
    return tuple(parse_density(each) for each in text.split(","))


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
    with exit_codes(_INTERRUPTED):
        set_cpu_affinity(num_threads)
        from xsake.benchmarking import model_shape
        from xsake.benchmarking.tuning import TunedFile, search
        from xsake.benchmarking.workloads import make_grid

        table = TunedFile.loads(out.read_text()) if out.exists() else TunedFile.of(())
        for length in parse_ints("--tokens", tokens, 1):
            for density in _parse_densities(densities):
                call, label = model_shape(shape, length), f"{length} tokens, {density:.0%}"
                grid = make_grid(call, density, block, 0)
                with ProgressBar(console, label) as bar:
                    best = search(
                        call, grid, block=block, dtype=dtype, is_backward=backward, rounds=repeats,
                        on_progress=bar.update,
                    )  # fmt: skip
                text = "the default tile sizes are fastest"
                if best.call is not None:
                    table = table.merge((best.call,))
                    table.save(out)
                    text = f"{best.best}: {best.speedup.describe()} of the default's speed"
                console.print(f"{label}, {best.tried} sizes: {text}")


@bench_app.command("report")
def run_report(
    rows: Annotated[list[Path], typer.Argument(help="Files of rows.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Output page.")] = Path("bench.html"),
) -> None:
    """Write measurements as a single self-contained HTML page."""
    from xsake.benchmarking import read_rows
    from xsake.reports.bench_report import page

    with exit_codes(_INTERRUPTED):
        measurements = [row for path in rows for row in read_rows(path)]
        if not measurements:
            raise ArgumentError(
                "no-rows", "the files hold no rows", expected="output of xsake bench -o"
            )
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
    from xsake.benchmarking import read_rows
    from xsake.benchmarking.rows import compare_rows

    with exit_codes(_INTERRUPTED):
        compared = compare_rows(read_rows(before), read_rows(after))
        if not compared:
            raise ArgumentError(
                "no-common-variant",
                "the files have no variant in common",
                got=f"{before} and {after}",
            )
    table = Table("experiment", "side", "size", "after / before", "verdict")
    for change in compared:
        verdict = "same or faster" if change.is_clear else "unclear"
        verdict = "[red]slower[/]" if change.is_slower(limit) else verdict
        text = "{:.3f} [{:.3f}, {:.3f}]".format(*vars(change.factor).values())
        table.add_row(change.experiment, change.side, change.size, text, verdict)
    rich.console.Console().print(table)
    if any(change.is_slower(limit) for change in compared):
        raise typer.Exit(code=FAILED)


@bench_app.command("quality")
def run_quality(
    model: ModelFolder,
    text: TextFiles,
    profile: Annotated[Path, typer.Option(help="Profile written by `xsake calibrate`.")],
    context: Annotated[int, typer.Option(min=16, help="Tokens per document.")] = 4096,
    densities: Annotated[
        str, typer.Option(help="Comma-separated costs, block selection included.")
    ] = "50%,30%,20%",
    policy: Annotated[str, typer.Option(help="Allocation policy.")] = "effect",
    selector: Annotated[str, typer.Option(help="Block selector.")] = "sampled",
    max_documents: Annotated[int, typer.Option(min=1, help="Maximum number of documents.")] = 4,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output: one JSON line per point.")
    ] = Path("quality.jsonl"),
    plot: PlotFile = None,
) -> None:
    """Measure the loss of a model at several costs: plans compared with windows of equal cost.

    An interrupted run resumes from the results cached next to the output.
    """
    console = rich.console.Console()
    with exit_codes():
        evaluation = import_extra("xsake.evaluation")
        from xsake import hads
        from xsake.evaluation.frontier import Planner, frontier
        from xsake.evaluation.plot import draw_frontier
        from xsake.evaluation.table import frontier_table

        planner = Planner(
            hads.Profile.load(profile), hads.make_policy(policy), hads.make_selector(selector)
        )
        settings = evaluation.EvaluationSettings((context,), documents=max_documents, gaps=())
        cache = evaluation.ResultCache(out.with_suffix(".windows.jsonl"))
        with ProgressBar(console, "cutting texts, compiling") as bar:
            points = frontier(
                load_eval_model(model, "float32"), evaluation.read_texts(text), settings, planner,
                _parse_densities(densities), cache=cache, on_progress=bar.show,
            )  # fmt: skip
        atomic_write(out, "".join(json.dumps(point.row()) + "\n" for point in points))
        if plot is not None:
            draw_frontier(points, plot)
    console.print(frontier_table(points))
    console.print(f"written to {out}", highlight=False)


@bench_app.command("training")
def run_training(
    configs: Annotated[list[Path], typer.Argument(help="Runs (TOML); the first is the baseline.")],
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a value in all runs, such as data.batch=2."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed steps per run.")] = 9,
    num_threads: NumThreads = None,
    out: RowsFile = None,
) -> None:
    """Compare the time of whole training steps of several runs, interleaved.

    Uses random tokens and saves nothing, so no data is needed.
    """
    console, names = rich.console.Console(), [path.stem for path in configs]
    with exit_codes():
        if len(set(names)) < len(names):
            got = ", ".join(names)
            raise ArgumentError(
                "run-names", "runs are named after their files", got=got, expected="unique names"
            )
        cores = set_cpu_affinity(num_threads)
        from xsake.benchmarking import append_rows, rows_table
        from xsake.benchmarking.training_step import time_steps
        from xsake.training.config import TrainingConfig

        runs = {path.stem: TrainingConfig.read(path, setting or ()) for path in configs}
        with ProgressBar(console, "compiling") as bar:
            rows = time_steps(runs, rounds=repeats, threads=cores, on_progress=bar.update)
        if out is not None:
            append_rows(out, rows)
    if not console.is_terminal:
        console.width = 160
    console.print(rows_table(rows, title=f"training steps, {cores} cores"))
    for row in rows:
        assert row.seconds is not None, "every run was timed"
        rate = row.shape.batch * row.shape.q_tokens / row.seconds.median
        console.print(f"{row.side}: {rate:,.0f} tokens/s", highlight=False)
