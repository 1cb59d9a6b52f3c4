"""What all experiments share: settings, the race between workers, saving and printing."""

import argparse
import contextlib
import math
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.experiments.reference import TOLERANCE, relative_error, true_attention
from benchmarks.peers.client import ROOT, Worker, WorkerError
from benchmarks.peers.recipes import DEFAULT_PEERS_DIR, IMPLEMENTATIONS, interpreter
from xsake._provenance import Environment, environment
from xsake.benchmarking import (
    BenchmarkRow,
    Claim,
    Ratio,
    Shape,
    Spread,
    TimedSide,
    Verdict,
    append_rows,
    check_limit,
    claims_table,
    interleave,
    pair_ratio,
    rows_table,
)
from xsake.benchmarking.rows import TimingStats
from xsake.layout.synthetic import causal_grid

RESULTS = ROOT / "benchmarks" / "results"
BLOCK = 128
LONG, LONG_ROUNDS = 8192, 9
"""Tokens from which fewer rounds are run; such calls are warm after compilation."""
SLOW, SLOW_ROUNDS, LONG_SLOW_ROUNDS = 4.0, 5, 3
"""A side this many times slower than the fastest stops after a few rounds: its ratio is
far from any limit, and it would take most of the time."""


@dataclass(frozen=True)
class Settings:
    """How to measure; what to measure is the experiment's affair."""

    rounds: int = 15
    threads: int = 2
    seed: int = 0
    tokens: int | None = None
    is_quick: bool = False
    is_saved: bool = True
    peers_dir: Path = DEFAULT_PEERS_DIR

    def choose(self, full: Sequence[int], quick: int = 1024) -> tuple[int, ...]:
        """The token counts to measure: those asked for, the small one, or the published ones."""
        if self.tokens is not None:
            return (self.tokens,)
        return (quick,) if self.is_quick else tuple(full)


@dataclass(frozen=True)
class Contender:
    """One side of a race: who, over which grid (None: all causally visible blocks), how deep."""

    side: str
    implementation: str
    grid: str | None = None
    is_backward: bool = False
    block: int = BLOCK
    dtype: str = "float32"


Outcome = tuple[list[BenchmarkRow], list[Claim]]
Measure = Callable[[Settings], Outcome]


def race(
    experiment: str,
    shape: Shape,
    contenders: Sequence[Contender],
    *,
    settings: Settings,
    baselines: Sequence[str],
    grids: Mapping[str, np.ndarray] | None = None,
) -> list[BenchmarkRow]:
    """Check every contender against float64, then time them interleaved; one row each.

    A peer that cannot be compiled or run has a row that says why, and takes no part.

    Args:
        experiment: name for the rows.
        shape: sizes of q, k and v; inputs are standard normal from `settings.seed`.
        contenders: the sides; those of one adapter share a worker process.
        settings: rounds, threads, seed, where the peers are.
        baselines: sides that all others are compared with.
        grids: block grids `[H, Nq, Nk]` by the names contenders use.
    """
    grids = dict(grids or {})
    began = environment(ROOT)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        arrays = draw_inputs(shape, settings.seed)
        for name, array in {**arrays, **grids}.items():
            np.save(Path(folder, f"{name}.npy"), array)
        workers = _start_workers(contenders, settings, Path(folder), stack)
        facts: dict[str, dict] = {}
        failures: dict[str, str] = {}
        for contender in contenders:
            worker = workers[contender.implementation]
            try:
                facts[contender.side] = worker.compile(contender.side, _case(contender))
            except WorkerError as error:
                if contender.implementation == "xsake":
                    raise
                failures[contender.side] = str(error).strip().splitlines()[-1]
        able = [c for c in contenders if c.side in facts]
        checked = [c for c in able if IMPLEMENTATIONS[c.implementation].is_attention]
        errors = _check(checked, workers, arrays, grids)
        sides = [
            TimedSide(c.side, lambda w=workers[c.implementation], name=c.side: w.run(name))
            for c in able
        ]
        times = take_turns(sides, settings, is_long=shape.q_tokens >= LONG)
        versions = {c.implementation: workers[c.implementation].versions for c in contenders}
    run = uuid.uuid4().hex[:12]
    tolerances = {contender.side: TOLERANCE[contender.dtype] for contender in checked}
    measured = {
        side: {
            "seconds": TimingStats(**vars(Spread.of(times[side]))),
            "repeats": len(times[side]),
            "ratios": _ratios(side, times, baselines),
            "compile_seconds": facts[side]["compile_seconds"],
            "temp_bytes": facts[side].get("temp_bytes"),
            **_accuracy(errors.get(side), tolerances.get(side)),
        }
        for side in times
    }
    return [
        _row(c, experiment, run, shape, settings, began, grids).model_copy(
            update={"versions": versions[c.implementation], "failure": failures.get(c.side)}
            | measured.get(c.side, {})
        )
        for c in contenders
    ]


def take_turns(
    sides: Sequence[TimedSide], settings: Settings, *, is_long: bool
) -> dict[str, list[float]]:
    """Seconds of every side, of a slow one only of the first rounds.

    Args:
        sides: who runs.
        settings: how many rounds, unless the calls are long.
        is_long: whether they are.
    """
    rounds = min(settings.rounds, LONG_ROUNDS) if is_long else settings.rounds
    few = min(rounds, LONG_SLOW_ROUNDS if is_long else SLOW_ROUNDS)
    times = interleave(sides, rounds=few, warmup=0 if is_long else 2)
    medians = {name: Spread.of(seconds).median for name, seconds in times.items()}
    quick = [side for side in sides if medians[side.name] <= SLOW * min(medians.values())]
    if rounds > few:
        for name, seconds in interleave(quick, rounds=rounds - few, warmup=0).items():
            times[name] += seconds
    return times


def limit_claim(
    topic: str,
    promise: str,
    rows: Sequence[BenchmarkRow],
    *,
    side: str,
    baseline: str,
    limit: float,
) -> Claim:
    """Judge the ratio of `side` to `baseline` against `limit`; a wrong result never passes."""
    by_side = {row.side: row for row in rows}
    limit_text = f"{promise} (<= {limit:.3g}x)"
    if by_side[baseline].failure:
        return Claim(topic, limit_text, f"{baseline} failed", Verdict.UNCLEAR)
    ratio = by_side[side].ratio_to(baseline)
    verdict = check_limit(ratio, limit)
    if by_side[baseline].is_correct is False:
        verdict = Verdict.UNCLEAR
    if by_side[side].is_correct is False:
        verdict = Verdict.FAIL
    return Claim(topic, limit_text, ratio.describe(), verdict)


def limit_claims(
    topic: str, rows: Sequence[BenchmarkRow], *, side: str, limits: Mapping[str, float]
) -> list[Claim]:
    """Judge the ratios of `side` to several others, each against its own limit."""
    return [
        limit_claim(topic, f"time of {other}", rows, side=side, baseline=other, limit=limit)
        for other, limit in limits.items()
    ]


def plain_row(
    experiment: str, run: str, shape: Shape, settings: Settings, **facts: object
) -> BenchmarkRow:
    """A row of a measurement that is no race: memory, build, compilation counts."""
    given = {
        "experiment": experiment, "run": run, "shape": shape, "threads": settings.threads,
        "seed": settings.seed, **environment(ROOT).fields(),
    }  # fmt: skip
    return BenchmarkRow.model_validate(given | facts)


def report(name: str, outcome: Outcome, settings: Settings) -> None:
    """Append the rows to `results/<name>.jsonl` and print both tables."""
    rows, claims = outcome
    if settings.is_saved:
        append_rows(RESULTS / f"{name}.jsonl", rows)
    show(rows_table(rows, title=name), *([claims_table(claims)] if claims else []))


def show(*tables: Table) -> None:
    """Print tables; wide enough for their words when the output is a file."""
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(*tables, sep="\n")


def command(name: str, measure: Measure, description: str | None) -> None:
    """The command line of one experiment."""
    settings = parse_settings(description)
    report(name, measure(settings), settings)


def parse_settings(description: str | None) -> Settings:
    """Settings from the command line; quick runs are never saved, they prove nothing."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, 5 rounds, nothing saved")
    parser.add_argument("--rounds", type=int, help="timed rounds (default 15)")
    parser.add_argument("--tokens", type=int, help="measure this length only")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_PEERS_DIR)
    parser.add_argument("--no-save", action="store_true", help="print only")
    given = parser.parse_args()
    return Settings(
        rounds=given.rounds or (5 if given.quick else 15),
        threads=given.threads,
        seed=given.seed,
        tokens=given.tokens,
        is_quick=given.quick,
        is_saved=not (given.no_save or given.quick),
        peers_dir=given.peers_dir,
    )


def budget_of(grid: np.ndarray) -> float:
    """Listed blocks over causally visible blocks, counted."""
    heads, blocks, _ = grid.shape
    return float(grid.sum() / causal_grid(heads, blocks).sum())


def blocks_of(tokens: int) -> int:
    """Number of blocks along one side."""
    return -(-tokens // BLOCK)


def draw_inputs(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Standard normal q, k, v and the cotangent of the output, `[B, T, H, D]` each."""
    random = np.random.default_rng(seed)
    queries = (shape.batch, shape.q_tokens, shape.q_heads, shape.head_dim)
    keys = (shape.batch, shape.kv_tokens, shape.kv_heads, shape.head_dim)
    sizes = {"q": queries, "k": keys, "v": keys, "cotangent": queries}
    return {name: random.standard_normal(size, np.float32) for name, size in sizes.items()}


def _start_workers(
    contenders: Sequence[Contender], settings: Settings, folder: Path, stack: contextlib.ExitStack
) -> dict[str, Worker]:
    """One worker per adapter, inputs loaded, by implementation name."""
    by_adapter: dict[str, Worker] = {}
    workers = {}
    for name in dict.fromkeys(contender.implementation for contender in contenders):
        chosen = IMPLEMENTATIONS[name]
        if chosen.adapter not in by_adapter:
            python = interpreter(chosen.environment, settings.peers_dir)
            is_isolated = chosen.environment is not None
            worker = Worker(
                python, chosen.adapter, threads=settings.threads, is_isolated=is_isolated
            )
            by_adapter[chosen.adapter] = stack.enter_context(worker)
            worker.load(folder)
        workers[name] = by_adapter[chosen.adapter]
    return workers


def _case(contender: Contender) -> dict:
    return {
        "call": IMPLEMENTATIONS[contender.implementation].call,
        "grid": contender.grid,
        "block": contender.block,
        "backward": contender.is_backward,
        "dtype": contender.dtype,
    }


def _check(
    contenders: Sequence[Contender],
    workers: Mapping[str, Worker],
    arrays: dict[str, np.ndarray],
    grids: Mapping[str, np.ndarray],
) -> dict[str, float]:
    """Relative error of every side against the float64 truth of its own grid."""
    truths: dict[tuple[str | None, bool], dict[str, np.ndarray]] = {}
    errors = {}
    for contender in contenders:
        key = (contender.grid, contender.is_backward)
        if key not in truths:
            grid = None if contender.grid is None else grids[contender.grid]
            truths[key] = true_attention(
                arrays, grid, contender.block, is_backward=contender.is_backward
            )
        measured = workers[contender.implementation].check(contender.side)
        errors[contender.side] = relative_error(measured, truths[key])
    return errors


def _accuracy(error: float | None, tolerance: float | None) -> dict[str, float | bool]:
    if error is None or tolerance is None:  # no attention
        return {}
    return {"is_correct": error <= tolerance} | (
        {"max_error": error} if math.isfinite(error) else {}
    )


def _common_ratio(seconds: list[float], baseline: list[float]) -> Spread:
    """Their ratio over the rounds that both took part in."""
    common = min(len(seconds), len(baseline))
    return pair_ratio(seconds[:common], baseline[:common])


def _ratios(
    side: str, times: Mapping[str, list[float]], baselines: Sequence[str]
) -> tuple[Ratio, ...]:
    return tuple(
        Ratio(baseline=other, **vars(_common_ratio(times[side], times[other])))
        for other in baselines
        if other != side and other in times
    )


def _row(
    contender: Contender,
    experiment: str,
    run: str,
    shape: Shape,
    settings: Settings,
    began: Environment,
    grids: Mapping[str, np.ndarray],
) -> BenchmarkRow:
    """The row without its numbers."""
    chosen = IMPLEMENTATIONS[contender.implementation]
    block = contender.block if chosen.is_blockwise else None
    return BenchmarkRow(
        experiment=experiment,
        run=run,
        side=contender.side,
        implementation=chosen.title,
        direction="forward+backward" if contender.is_backward else "forward",
        shape=shape,
        dtype=contender.dtype,
        mask="causal",
        layout=(contender.grid or "causal") if chosen.is_blockwise else "none",
        budget=1.0 if contender.grid is None else budget_of(grids[contender.grid]),
        block_q=block,
        block_kv=block,
        threads=settings.threads,
        seed=settings.seed,
        **began.fields(),
    )
