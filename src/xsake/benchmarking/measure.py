"""Benchmark of attention: all sides interleaved in one process, one row per side."""

import dataclasses
import math
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from xsake._progress import Progress, ProgressFn
from xsake._provenance import checkout_root, environment
from xsake.benchmarking.rows import (
    PRODUCT,
    BenchmarkRow,
    Ratio,
    Shape,
    TimingStats,
    model_shape,
    provenance_fields,
)
from xsake.benchmarking.runner import Spread, TimedSide, interleave, pair_ratio, time_warm
from xsake.benchmarking.workloads import (
    TOLERANCE,
    AttentionInputs,
    CompiledCall,
    dense_bytes,
    jax_nn_call,
    make_grid,
    matmul_call,
    random_inputs,
    spot_error,
    xsake_call,
)
from xsake.errors import ArgumentError
from xsake.layout.synthetic import causal_grid

BenchKind = Literal["attention", "backward", "decode", "memory"]
DENSE = "xsake, all blocks"


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """Benchmark settings."""

    shape: str = "square"  # a name of HEADS
    tokens: tuple[int, ...] = (1024, 4096)
    budgets: tuple[float, ...] = (0.43, 0.25)  # shares of the causally visible blocks
    block: int = 128
    dtype: str = "float32"
    rounds: int = 9
    threads: int = 1  # cores of the process, recorded in the row
    seed: int = 0
    max_bytes: int = 8 * 10**9  # sides that exceed it by estimate are skipped, with a row
    trace: Path | None = None  # folder for a Perfetto trace of one call of each side

    def __post_init__(self):
        if self.dtype not in TOLERANCE:
            raise ArgumentError(
                "bench-dtype", "unknown dtype", got=self.dtype, expected=", ".join(TOLERANCE)
            )


def measure(
    kind: BenchKind,
    settings: BenchSettings,
    *,
    keep: Callable[[list[BenchmarkRow]], None] = lambda _: None,
    on_progress: ProgressFn = lambda _: None,
) -> list[BenchmarkRow]:
    """Run a benchmark and return its rows; `keep` is called with those of each length."""
    all_rows = []
    for done, tokens in enumerate(settings.tokens):
        on_progress(Progress(done, len(settings.tokens), f"{kind}, {tokens} tokens"))
        shape = model_shape(settings.shape, tokens)
        if kind == "decode":
            shape = shape.model_copy(update={"q_tokens": 1})
        rows = _measure_length(kind, shape, settings)
        keep(rows)
        all_rows += rows
    return all_rows


def _measure_length(kind: BenchKind, shape: Shape, settings: BenchSettings) -> list[BenchmarkRow]:
    inputs = random_inputs(shape, settings.dtype, settings.seed)
    common = {
        "experiment": kind, "run": uuid.uuid4().hex[:12], "shape": shape, "dtype": settings.dtype,
        "mask": "none" if kind == "decode" else "causal", "layout": "none",
        "threads": settings.threads, "device": jax.devices()[0].device_kind, "seed": settings.seed,
        **provenance_fields(environment(checkout_root())),
    }  # fmt: skip
    calls, failures = _compile_calls(kind, inputs, shape, settings)
    product = matmul_call(settings.dtype, settings.seed)
    times: dict[str, list[float]] = {}
    if kind != "memory":
        sides = [TimedSide(x.side, lambda run=x.run: time_warm(run)) for x in (*calls, product)]
        times = interleave(sides, rounds=settings.rounds)
        if settings.trace is not None:
            _trace(calls, settings.trace / f"{kind}_{shape.kv_tokens}")
    rows = []
    for call in calls:
        fields = {
            "side": call.side,
            "implementation": call.implementation,
            "flops": call.flops,
            "temp_bytes": call.temp_bytes,
            "compile_seconds": call.compile_seconds,
            "direction": "forward+backward" if kind in ("backward", "memory") else "forward",
            **_grid_fields(call, settings.block),
            **_check_result(call, inputs, settings),
            **(_timing_fields(call, times, product) if times else {}),
        }
        rows.append(BenchmarkRow.model_validate(common | fields))
    return rows + [BenchmarkRow.model_validate(common | fields) for fields in failures]


def _trace(calls: Sequence[CompiledCall], folder: Path) -> None:
    """Trace one call of each side."""
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        for call in calls:
            with jax.profiler.TraceAnnotation(call.side):
                jax.block_until_ready(call.run())


def _compile_calls(kind: BenchKind, inputs: AttentionInputs, shape: Shape, settings: BenchSettings):
    """Return compiled calls, and the fields of skipped sides."""
    is_backward, runs = kind in ("backward", "memory"), kind != "memory"
    options: Any = {"block": settings.block, "is_backward": is_backward, "runs": runs}
    calls = [xsake_call(inputs, DENSE, None, **options)]
    for budget in () if kind == "decode" else settings.budgets:
        grid = make_grid(shape, budget, settings.block, settings.seed)
        calls.append(xsake_call(inputs, f"xsake, {budget:.0%}", grid, **options))
    required = dense_bytes(shape, is_backward=is_backward)
    if runs and required > settings.max_bytes:
        reason = f"not run: its scores alone are about {required / 1e9:.0f} GB"
        skipped = {"side": "jax.nn", "implementation": "jax.nn.dot_product_attention"}
        return calls, [skipped | {"failure": reason}]
    return [*calls, jax_nn_call(inputs, is_backward=is_backward, runs=runs)], []


def _grid_fields(call: CompiledCall, block: int) -> dict[str, Any]:
    if call.grid is None:
        return {}
    budget = float(call.grid.sum() / causal_grid(*call.grid.shape[:2]).sum())
    layout = "causal" if budget == 1 else "ragged"
    return {"layout": layout, "budget": budget, "block_q": block, "block_kv": block}


def _check_result(
    call: CompiledCall, inputs: AttentionInputs, settings: BenchSettings
) -> dict[str, Any]:
    if call.result is None:
        return {}
    result = call.result if isinstance(call.result, tuple) else (call.result,)
    error = spot_error(inputs, result, call.grid, block=settings.block, seed=settings.seed)
    is_correct = bool(error <= TOLERANCE[settings.dtype])
    return {"max_error": error if math.isfinite(error) else None, "is_correct": is_correct}


def _timing_fields(
    call: CompiledCall, times: dict[str, list[float]], product: CompiledCall
) -> dict[str, Any]:
    """Return seconds and the ratios to other sides and to a matrix product of the same flops."""
    seconds = times[call.side]
    baselines = {name: times[name] for name in (DENSE, "jax.nn") if name in times}
    baselines[PRODUCT] = [each * call.flops / product.flops for each in times[product.side]]
    ratios = tuple(
        Ratio(baseline=name, **vars(pair_ratio(seconds, other)))
        for name, other in baselines.items()
        if name != call.side
    )
    timing = TimingStats(**vars(Spread.of(seconds)))
    return {"seconds": timing, "repeats": len(seconds), "ratios": ratios}
