"""Benchmark of attention: all sides interleaved in one process, one row per side."""

import dataclasses
import math
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from xsake._provenance import Environment, checkout_root, environment
from xsake.bench.calls import (
    AttentionInputs,
    CompiledCall,
    dense_bytes,
    jax_nn_call,
    matmul_call,
    random_inputs,
    xsake_call,
)
from xsake.bench.rows import BenchmarkRow, Ratio, Shape, TimingStats
from xsake.bench.runner import Spread, TimedSide, interleave, pair_ratio, time_warm
from xsake.bench.shapes import model_shape
from xsake.bench.spot_check import TOLERANCE, spot_error
from xsake.layout.grid import count_blocks
from xsake.layout.synthetic import causal_grid, ragged_grid

BenchKind = Literal["attention", "backward", "decode", "memory"]
PRODUCT = "bare product of as many flops"
DENSE = "xsake, all blocks"


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """Benchmark settings.

    Args:
        shape: a name of `xsake.bench.HEADS`.
        tokens: sequence lengths.
        budgets: shares of the causally visible blocks; heads get from 10% to 90%.
        block: tokens of a block.
        dtype: of all arrays.
        rounds: timed rounds.
        threads: cores of the process, recorded in the row.
        seed: of arrays and grids.
        max_bytes: memory limit; sides that exceed it by estimate are skipped, with a row.
        trace: folder for a Perfetto trace of one call of each side; None: no trace.
    """

    shape: str = "square"
    tokens: tuple[int, ...] = (1024, 4096)
    budgets: tuple[float, ...] = (0.43, 0.25)
    block: int = 128
    dtype: str = "float32"
    rounds: int = 9
    threads: int = 1
    seed: int = 0
    max_bytes: int = 8 * 10**9
    trace: Path | None = None


def measure(
    kind: BenchKind, settings: BenchSettings, on_progress: Callable[[int, list[BenchmarkRow]], None]
) -> list[BenchmarkRow]:
    """Run a benchmark and return its rows.

    Args:
        kind: forward, forward and backward, one decode step, or compiled memory only.
        settings: of the benchmark.
        on_progress: called with the number of finished lengths and the rows of the last one.
    """
    all_rows = []
    for done, tokens in enumerate(settings.tokens, start=1):
        shape = model_shape(settings.shape, tokens)
        if kind == "decode":
            shape = shape.model_copy(update={"q_tokens": 1})
        rows = _measure_length(kind, shape, settings)
        all_rows += rows
        on_progress(done, rows)
    return all_rows


def _measure_length(kind: BenchKind, shape: Shape, settings: BenchSettings) -> list[BenchmarkRow]:
    is_backward = kind in ("backward", "memory")
    inputs = random_inputs(shape, settings.dtype, settings.seed)
    began = environment(checkout_root())
    calls, failures = _calls(kind, inputs, shape, settings)
    product = matmul_call(settings.dtype, settings.seed)
    times: dict[str, list[float]] = {}
    if kind != "memory":
        sides = [TimedSide(x.side, lambda run=x.run: time_warm(run)) for x in (*calls, product)]
        times = interleave(sides, rounds=settings.rounds)
        if settings.trace is not None:
            _trace(calls, settings.trace / f"{kind}_{shape.kv_tokens}")
    run, rows = uuid.uuid4().hex[:12], []
    for call in calls:
        row = _row(kind, run, call.side, call.implementation, shape, settings, began)
        fields: dict[str, Any] = {
            "flops": call.flops,
            "temp_bytes": call.temp_bytes,
            "compile_seconds": call.compile_seconds,
            "direction": "forward+backward" if is_backward else "forward",
        }
        if call.grid is not None:
            fields |= _grid_fields(call.grid, settings.block)
        fields |= _check_result(call, inputs, settings)
        if times:
            fields |= _timing_fields(call, times, product, calls)
        rows.append(BenchmarkRow.model_validate(row | fields))
    for side, (implementation, reason) in failures.items():
        row = _row(kind, run, side, implementation, shape, settings, began)
        rows.append(BenchmarkRow.model_validate(row | {"failure": reason}))
    return rows


def _trace(calls: Sequence[CompiledCall], folder: Path) -> None:
    """Trace one call of each side."""
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        for call in calls:
            with jax.profiler.TraceAnnotation(call.side):
                jax.block_until_ready(call.run())


def _calls(kind: BenchKind, inputs: AttentionInputs, shape: Shape, settings: BenchSettings):
    """Return compiled calls, and the implementation and reason of skipped sides."""
    is_backward, failures = kind in ("backward", "memory"), {}
    sizes: dict[str, Any] = {"block": settings.block, "is_backward": is_backward}
    sizes["runs"] = kind != "memory"
    calls = [xsake_call(inputs, DENSE, None, **sizes)]
    if kind != "decode":
        for budget in settings.budgets:
            grid = make_grid(shape, budget, settings.block, settings.seed)
            calls.append(xsake_call(inputs, f"xsake, {budget:.0%}", grid, **sizes))
    required = dense_bytes(shape, is_backward=is_backward)
    if kind != "memory" and required > settings.max_bytes:
        reason = f"not run: its scores alone are about {required / 1e9:.0f} GB"
        failures["jax.nn"] = ("jax.nn.dot_product_attention", reason)
    else:
        calls.append(jax_nn_call(inputs, is_backward=is_backward, runs=kind != "memory"))
    return calls, failures


def make_grid(shape: Shape, budget: float, block: int, seed: int) -> np.ndarray | None:
    """Draw the blocks of a call: heads from 10% to 90% if the mean allows it, else equal."""
    heads, blocks = shape.q_heads, count_blocks(shape.q_tokens, block)
    if budget >= 1:
        return None
    margin = 0.8 / heads
    if heads > 2 and 0.1 + margin < budget < 0.9 - margin:
        return ragged_grid(heads, blocks, budget, seed=seed)
    return ragged_grid(heads, blocks, budget, seed=seed, low=budget * 0.999, high=budget * 1.001)


def _row(
    kind: BenchKind, run: str, side: str, name: str, shape: Shape, settings, began: Environment
):
    return {
        "experiment": kind, "run": run, "side": side, "implementation": name, "shape": shape,
        "dtype": settings.dtype, "mask": "none" if kind == "decode" else "causal", "layout": "none",
        "threads": settings.threads, "device": jax.devices()[0].device_kind, "seed": settings.seed,
        "versions": began.versions, "commit": began.commit, "dirty": began.dirty, "utc": began.utc,
        "cpu": began.cpu, "load_average": began.load_average,
    }  # fmt: skip


def _grid_fields(grid: np.ndarray, block: int) -> dict[str, Any]:
    visible = causal_grid(*grid.shape[:2]).sum()
    budget = float(grid.sum() / visible)
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
    call: CompiledCall, times: dict, product: CompiledCall, calls: Sequence[CompiledCall]
) -> dict[str, Any]:
    """Return seconds and the ratios to other sides and to a matrix product of the same flops."""
    seconds = times[call.side]
    ratios = [
        Ratio(baseline=other, **vars(pair_ratio(seconds, times[other])))
        for other in (DENSE, "jax.nn")
        if other != call.side and any(x.side == other for x in calls)
    ]
    scaled = [each * call.flops / product.flops for each in times[product.side]]
    ratios.append(Ratio(baseline=PRODUCT, **vars(pair_ratio(seconds, scaled))))
    timing = TimingStats(**vars(Spread.of(seconds)))
    return {"seconds": timing, "repeats": len(seconds), "ratios": tuple(ratios)}
