"""Measures attention as a user meets it: all sides interleaved in one process, a row for each."""

import dataclasses
import math
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from xsake._provenance import Environment, environment, own_checkout
from xsake.bench.calls import Call, Inputs, bare_product, dense_bytes, drawn, ours, theirs
from xsake.bench.rows import BenchmarkRow, Ratio, Shape, Timing
from xsake.bench.runner import Side, Spread, interleave, pair_ratio, time_warm
from xsake.bench.shapes import shape_of
from xsake.bench.spot_check import TOLERANCE, spot_error
from xsake.layout.grid import blocks_of
from xsake.layout.synthetic import causal_grid, ragged_grid

Kind = Literal["attention", "backward", "decode", "memory"]
PRODUCT = "bare product of as many flops"
DENSE = "xsake, all blocks"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured, and how.

    Args:
        shape: a name of `xsake.bench.HEADS`.
        tokens: lengths, one after the other.
        budgets: shares of the causally visible blocks; heads get from 10% to 90%.
        block: tokens of a block.
        dtype: of all arrays.
        rounds: timed rounds.
        threads: cores that the process was given; only written down.
        seed: of arrays and grids.
        most_bytes: a side that needs about more than this is not run, and its row says so.
        trace: one call of each side, after they were timed, is traced into a folder of this one,
            for Perfetto; None: nothing is.
    """

    shape: str = "square"
    tokens: tuple[int, ...] = (1024, 4096)
    budgets: tuple[float, ...] = (0.43, 0.25)
    block: int = 128
    dtype: str = "float32"
    rounds: int = 9
    threads: int = 1
    seed: int = 0
    most_bytes: int = 8 * 10**9
    trace: Path | None = None


def measure(
    kind: Kind, settings: Settings, watch: Callable[[int, list[BenchmarkRow]], None]
) -> list[BenchmarkRow]:
    """All rows of one kind.

    Args:
        kind: forward passes, both passes, a single new token, or the compiler's memory alone.
        settings: what is measured.
        watch: told how many lengths are done, and the rows of the last one.
    """
    found = []
    for done, tokens in enumerate(settings.tokens, start=1):
        shape = shape_of(settings.shape, tokens)
        if kind == "decode":
            shape = shape.model_copy(update={"q_tokens": 1})
        rows = _of_length(kind, shape, settings)
        found += rows
        watch(done, rows)
    return found


def _of_length(kind: Kind, shape: Shape, settings: Settings) -> list[BenchmarkRow]:
    is_backward = kind in ("backward", "memory")
    inputs = drawn(shape, settings.dtype, settings.seed)
    began = environment(own_checkout())
    calls, failures = _calls(kind, inputs, shape, settings)
    product = bare_product(settings.dtype, settings.seed)
    times: dict[str, list[float]] = {}
    if kind != "memory":
        sides = [Side(x.side, lambda run=x.run: time_warm(run)) for x in (*calls, product)]
        times = interleave(sides, rounds=settings.rounds)
        if settings.trace is not None:
            _trace(calls, settings.trace / f"{kind}_{shape.kv_tokens}")
    run, rows = uuid.uuid4().hex[:12], []
    for call in calls:
        row = _row(kind, run, call.side, call.implementation, shape, settings, began)
        facts: dict[str, Any] = {
            "flops": call.flops,
            "temp_bytes": call.temp_bytes,
            "compile_seconds": call.compile_seconds,
            "direction": "forward+backward" if is_backward else "forward",
        }
        if call.grid is not None:
            facts |= _of_grid(call.grid, settings.block)
        facts |= _checked(call, inputs, settings)
        if times:
            facts |= _timed(call, times, product, calls)
        rows.append(BenchmarkRow.model_validate(row | facts))
    for side, (implementation, why) in failures.items():
        row = _row(kind, run, side, implementation, shape, settings, began)
        rows.append(BenchmarkRow.model_validate(row | {"failure": why}))
    return rows


def _trace(calls: Sequence[Call], folder: Path) -> None:
    """Where the time of one call of each side goes, in one trace."""
    with jax.profiler.trace(str(folder), create_perfetto_trace=True):
        for call in calls:
            with jax.profiler.TraceAnnotation(call.side):
                jax.block_until_ready(call.run())


def _calls(kind: Kind, inputs: Inputs, shape: Shape, settings: Settings):
    """`(what can be run, why the rest cannot by side)`."""
    is_backward, failures = kind in ("backward", "memory"), {}
    sizes: dict[str, Any] = {"block": settings.block, "is_backward": is_backward}
    sizes["runs"] = kind != "memory"
    calls = [ours(inputs, DENSE, None, **sizes)]
    if kind != "decode":
        for budget in settings.budgets:
            grid = grid_of(shape, budget, settings.block, settings.seed)
            calls.append(ours(inputs, f"xsake, {budget:.0%}", grid, **sizes))
    needed = dense_bytes(shape, is_backward=is_backward)
    if kind != "memory" and needed > settings.most_bytes:
        why = f"not run: its scores alone are about {needed / 1e9:.0f} GB"
        failures["jax.nn"] = ("jax.nn.dot_product_attention", why)
    else:
        calls.append(theirs(inputs, is_backward=is_backward, runs=kind != "memory"))
    return calls, failures


def grid_of(shape: Shape, budget: float, block: int, seed: int) -> np.ndarray | None:
    """Blocks of a call: heads between 10% and 90% where they can have that mean, else all alike.

    Args:
        shape: of the call.
        budget: share of the visible blocks; 1: None, which is all of them.
        block: tokens of a block.
        seed: of the draw.
    """
    heads, blocks = shape.q_heads, blocks_of(shape.q_tokens, block)
    if budget >= 1:
        return None
    reach = 0.8 / heads
    if heads > 2 and 0.1 + reach < budget < 0.9 - reach:
        return ragged_grid(heads, blocks, budget, seed=seed)
    return ragged_grid(heads, blocks, budget, seed=seed, low=budget * 0.999, high=budget * 1.001)


def _row(kind: Kind, run: str, side: str, name: str, shape: Shape, settings, began: Environment):
    return {
        "experiment": kind, "run": run, "side": side, "implementation": name, "shape": shape,
        "dtype": settings.dtype, "mask": "none" if kind == "decode" else "causal", "layout": "none",
        "threads": settings.threads, "device": jax.devices()[0].device_kind, "seed": settings.seed,
        "versions": began.versions, "commit": began.commit, "dirty": began.dirty, "utc": began.utc,
        "cpu": began.cpu, "load_average": began.load_average,
    }  # fmt: skip


def _of_grid(grid: np.ndarray, block: int) -> dict[str, Any]:
    visible = causal_grid(*grid.shape[:2]).sum()
    budget = float(grid.sum() / visible)
    layout = "causal" if budget == 1 else "ragged"
    return {"layout": layout, "budget": budget, "block_q": block, "block_kv": block}


def _checked(call: Call, inputs: Inputs, settings: Settings) -> dict[str, Any]:
    if call.result is None:
        return {}
    result = call.result if isinstance(call.result, tuple) else (call.result,)
    error = spot_error(inputs, result, call.grid, block=settings.block, seed=settings.seed)
    is_correct = bool(error <= TOLERANCE[settings.dtype])
    return {"max_error": error if math.isfinite(error) else None, "is_correct": is_correct}


def _timed(call: Call, times: dict, product: Call, calls: Sequence[Call]) -> dict[str, Any]:
    """Seconds, the ratio to other sides, and to a bare product of as many flops."""
    own = times[call.side]
    ratios = [
        Ratio(baseline=other, **vars(pair_ratio(own, times[other])))
        for other in (DENSE, "jax.nn")
        if other != call.side and any(x.side == other for x in calls)
    ]
    equal = [seconds * call.flops / product.flops for seconds in times[product.side]]
    ratios.append(Ratio(baseline=PRODUCT, **vars(pair_ratio(own, equal))))
    seconds = Timing(**vars(Spread.of(own)))
    return {"seconds": seconds, "repeats": len(own), "ratios": tuple(ratios)}
