"""Trained sparse attention compared with dense attention, for `native_sparse` and `indexed`."""

import functools
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import xsake
from benchmarks.experiments.common import Outcome, Settings, limit_claim, plain_row
from xsake._format import format_bytes
from xsake.benchmarking import BenchmarkRow, Claim, Shape, Verdict
from xsake.benchmarking.rows import Ratio, TimingStats
from xsake.benchmarking.runner import Spread, TimedSide, interleave, pair_ratio, time_call

Q_HEADS, KV_HEADS, DIM = 12, 4, 64
JUDGED = 8192
CHECKED_TOKENS, TOLERANCE = 1024, 1e-5
LONG_TOKENS, GROWTH_LIMIT = (4096, 16384, 32768), 1.05  # bytes per token, from 4k tokens on

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A kind of trained sparse attention.

    Args:
        name: of the experiment and its rows.
        title: of its claims.
        function: that rows name.
        draw: makes the arguments of the calls: tokens, seed.
        calls: sides by name, the whole attention first; each takes the arguments.
        dense: dense attention over the same arguments.
        limits: largest ratios to dense, by direction.
        lengths: measured numbers of tokens.
    """

    name: str
    title: str
    function: str
    draw: Callable[[int, int], Arrays]
    calls: dict[str, Callable]
    dense: Callable
    limits: dict[str, float]
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384)

    @property
    def side(self) -> str:
        """Name of the whole attention, which also takes `implementation`."""
        return next(iter(self.calls))


def causal(q, k, v, implementation=None):
    """Dense causal attention."""
    return xsake.attention(q, k, v, mask=xsake.masks.Causal(), implementation=implementation)


def compiled(call: Callable, x: Arrays, direction: str):
    """Compile the call, or the gradients of a sum of its output."""
    if direction == "forward":
        return jax.jit(lambda x: call(**x)).lower(x).compile()
    loss = lambda x: (call(**x) * jnp.cos(x["q"])).sum()
    return jax.jit(jax.value_and_grad(loss)).lower(x).compile()


def error(family: Family, seed: int) -> float:
    """Return the largest relative difference of gradients from the reference."""
    x = family.draw(CHECKED_TOKENS, seed)
    call = family.calls[family.side]
    runs = [
        compiled(functools.partial(call, implementation=name), x, "forward+backward")(x)[1]
        for name in (None, "reference")
    ]
    pairs = zip(*map(jax.tree.leaves, runs), strict=True)
    largest = lambda a, b: jnp.abs(a - b).max() / jnp.maximum(jnp.abs(b).max(), 1e-9)
    return max(float(largest(a, b)) for a, b in pairs)


def measure(family: Family, settings: Settings) -> Outcome:
    """Race both directions at every length; judge one length, the crossover and memory."""
    worst = error(family, settings.seed)
    rows: list[BenchmarkRow] = []
    claims: list[Claim] = []
    lengths = settings.choose(family.lengths, quick=256)
    for tokens in lengths:
        for direction, limit in family.limits.items():
            said = f"{tokens} tokens, {direction}, of up to {lengths[-1]}"
            print(said, file=sys.stderr, flush=True)
            found = _race(family, tokens, direction, settings, worst)
            rows += found
            if tokens == JUDGED or len(lengths) == 1:
                topic = f"{family.title}, {direction}, {tokens} tokens"
                claims.append(
                    limit_claim(topic, "of dense", found, side=family.side, baseline="dense",
                                limit=limit)
                )  # fmt: skip
    claims += _crossover(family, rows) if len(lengths) > 1 else []
    claims += _growth(family, settings) if len(lengths) > 1 else []
    return rows, claims


def _race(
    family: Family, tokens: int, direction: str, settings: Settings, worst: float
) -> list[BenchmarkRow]:
    x, run = family.draw(tokens, settings.seed), uuid.uuid4().hex[:12]
    programs, first = {}, {}
    is_forward = direction == "forward"
    calls = {"dense": family.dense} | {
        name: call for name, call in family.calls.items() if is_forward or name not in NO_GRADIENT
    }
    for name, call in calls.items():
        begin = functools.partial(compiled, call, x, direction)
        first[name] = time_call(lambda name=name, begin=begin: programs.update({name: begin()}))
    wait = lambda program: jax.block_until_ready(program(x))
    sides = [
        TimedSide(name, functools.partial(time_call, functools.partial(wait, program)))
        for name, program in programs.items()
    ]
    seconds = interleave(sides, rounds=settings.rounds, warmup=1)
    shape = Shape(
        batch=1, q_tokens=tokens, kv_tokens=tokens, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM
    )
    rows = []
    for name, program in programs.items():
        is_dense = name == "dense"
        ratio = pair_ratio(seconds[name], seconds["dense"])
        rows.append(
            plain_row(
                family.name, run, shape, settings, side=name, direction=direction, mask="causal",
                implementation="xsake.attention" if is_dense else family.function,
                layout="causal" if is_dense else "selected by each token",
                compile_seconds=first[name],
                seconds=TimingStats(**vars(Spread.of(seconds[name]))),
                repeats=settings.rounds,
                ratios=() if is_dense else (Ratio(baseline="dense", **vars(ratio)),),
                temp_bytes=int(program.memory_analysis().temp_size_in_bytes),
                max_error=None if is_dense else worst,
                is_correct=None if is_dense else worst <= TOLERANCE,
            )
        )  # fmt: skip
    return rows


NO_GRADIENT = frozenset({"selection"})  # sides that return integers


def _crossover(family: Family, rows: list[BenchmarkRow]) -> list[Claim]:
    """Claim the shortest measured length from which a family is faster than dense attention."""
    claims = []
    for direction in family.limits:
        mine = [row for row in rows if row.side == family.side and row.direction == direction]
        slower = [row.shape.q_tokens for row in mine if row.ratio_to("dense").median >= 1]
        faster = [row.shape.q_tokens for row in mine if row.shape.q_tokens > max(slower, default=0)]
        text = f"from {min(faster)} tokens on" if faster else "at no measured length"
        verdict = Verdict.PASS if faster else Verdict.FAIL
        topic = f"{family.title} faster than dense, {direction}"
        claims.append(Claim(topic, "stated, not promised", text, verdict))
    return claims


def _growth(family: Family, settings: Settings) -> list[Claim]:
    """Claim linear memory, by the compiler's figures; nothing is run."""
    sizes = {}
    for tokens in LONG_TOKENS:
        x = jax.tree.map(
            lambda leaf, tokens=tokens: jax.ShapeDtypeStruct(
                tuple(tokens if n == 256 else n for n in leaf.shape), leaf.dtype
            ),
            family.draw(256, settings.seed),
        )
        program = compiled(family.calls[family.side], x, "forward+backward")
        sizes[tokens] = int(program.memory_analysis().temp_size_in_bytes)
    smallest = min(sizes)
    worst = max(size / tokens / (sizes[smallest] / smallest) for tokens, size in sizes.items())
    text = ", ".join(f"{tokens}: {format_bytes(size)}" for tokens, size in sizes.items())
    verdict = Verdict.PASS if worst <= GROWTH_LIMIT else Verdict.FAIL
    topic = f"temporary memory of {family.title}, forward+backward"
    return [Claim(topic, f"bytes per token grow by at most {GROWTH_LIMIT}", text, verdict)]
