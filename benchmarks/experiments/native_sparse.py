"""Native sparse attention compared with dense attention: time, crossover length and memory.

python -m benchmarks.experiments.native_sparse  # 1k to 16k tokens, 12 on 4 heads, paper's blocks
python -m benchmarks.experiments.native_sparse --quick
python -m benchmarks.experiments.native_sparse --tokens 8192 --rounds 9

Keys and values are each branch's own; everything is drawn, so neighbouring tokens select blocks
independently, which is the hardest case for any kernel that computes tiles. Dense is causal
`xsake.attention`. The side `selected` also scores summaries, to select. Sides run in one process,
in turns.
"""

import functools
import sys
import uuid
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xsake
from benchmarks.experiments.common import Outcome, Settings, command, limit_claim, plain_row
from xsake import nsa
from xsake._format import format_bytes
from xsake.benchmarking import BenchmarkRow, Claim, Shape, Verdict
from xsake.benchmarking.rows import Ratio, TimingStats
from xsake.benchmarking.runner import Spread, TimedSide, interleave, pair_ratio, time_call

LENGTHS = (1024, 2048, 4096, 8192, 16384)
Q_HEADS, KV_HEADS, DIM = 12, 4, 64
JUDGED = 8192
LIMITS = {"forward": 0.35, "forward+backward": 0.4}
GROWTH_LIMIT = 4.2  # of temporary bytes from 4k to 16k tokens; linear is 4
CHECKED_TOKENS, TOLERANCE = 1024, 1e-5

Arrays = dict[str, Any]


def drawn(tokens: int, seed: int) -> Arrays:
    """Queries, keys and values by branch, and gates."""
    rng = np.random.default_rng(seed)
    draw = lambda *rest: jnp.asarray(rng.standard_normal((1, tokens, *rest), np.float32))
    keys, values = (nsa.KV(*(draw(KV_HEADS, DIM) for _ in range(3))) for _ in range(2))
    gates = nsa.Gates.sigmoid(draw(Q_HEADS, 3))
    return {"q": draw(Q_HEADS, DIM), "k": keys, "v": values, "gates": gates}


def dense(q, k: nsa.KV, v: nsa.KV, gates: nsa.Gates, implementation=None):
    """Causal attention over the keys of one branch."""
    del gates
    mask = xsake.masks.Causal()
    return xsake.attention(q, k.selected, v.selected, mask=mask, implementation=implementation)


def native(q, k: nsa.KV, v: nsa.KV, gates: nsa.Gates, implementation=None, only=None):
    """All branches, or one of them."""
    if only is not None:
        gates = nsa.Gates(None, None, None)._replace(**{only: getattr(gates, only)})
    call = functools.partial(nsa.attention, config=nsa.Config())
    return call(q, k, v, gates, implementation=implementation)


CALLS: dict[str, Callable] = {"dense": dense, "native": native}
CALLS |= {name: functools.partial(native, only=name) for name in nsa.Gates._fields}


def compiled(call: Callable, x: Arrays, direction: str):
    """The call, or the gradients of the sum of what it returns, compiled."""
    if direction == "forward":
        return jax.jit(lambda x: call(**x)).lower(x).compile()
    loss = lambda x: (call(**x) * jnp.cos(x["q"])).sum()
    return jax.jit(jax.value_and_grad(loss)).lower(x).compile()


def error(settings: Settings) -> float:
    """The largest difference from the reference, outputs and gradients, relative to the largest."""
    x = drawn(CHECKED_TOKENS, settings.seed)
    runs = [
        compiled(functools.partial(native, implementation=name), x, "forward+backward")(x)[1]
        for name in (None, "reference")
    ]
    pairs = zip(*map(jax.tree.leaves, runs), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


def measure(settings: Settings) -> Outcome:
    """Race both directions at every length; judge one length, the crossover and memory."""
    worst = error(settings)
    rows: list[BenchmarkRow] = []
    claims: list[Claim] = []
    lengths = settings.choose(LENGTHS, quick=256)
    for tokens in lengths:
        for direction, limit in LIMITS.items():
            print(
                f"{tokens} tokens, {direction}, of up to {lengths[-1]}", file=sys.stderr, flush=True
            )
            found = _raced(tokens, direction, settings, worst)
            rows += found
            if tokens == JUDGED or len(lengths) == 1:
                claims.append(
                    limit_claim(
                        f"native sparse attention, {direction}, {tokens} tokens",
                        "of dense",
                        found,
                        side="native",
                        baseline="dense",
                        limit=limit,
                    )  # fmt: skip
                )
    claims += _crossover(rows) if len(lengths) > 1 else []
    claims += _growth(rows)
    return rows, claims


def _raced(tokens: int, direction: str, settings: Settings, worst: float) -> list[BenchmarkRow]:
    x, run = drawn(tokens, settings.seed), uuid.uuid4().hex[:12]
    programs, first = {}, {}
    for name, call in CALLS.items():
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
        ratio = () if is_dense else (_ratio(seconds[name], seconds["dense"]),)
        rows.append(
            plain_row(
                "native_sparse",
                run,
                shape,
                settings,
                side=name,
                direction=direction,
                mask="causal",
                implementation=f"xsake.{'attention' if is_dense else 'native_sparse_attention'}",
                layout="causal" if is_dense else "selected by each token",
                compile_seconds=first[name],
                seconds=TimingStats(**vars(Spread.of(seconds[name]))),
                repeats=settings.rounds,
                ratios=ratio,
                temp_bytes=int(program.memory_analysis().temp_size_in_bytes),
                max_error=None if is_dense else worst,
                is_correct=None if is_dense else worst <= TOLERANCE,
            )  # fmt: skip
        )
    return rows


def _ratio(seconds: list[float], baseline: list[float]) -> Ratio:
    return Ratio(baseline="dense", **vars(pair_ratio(seconds, baseline)))


def _crossover(rows: list[BenchmarkRow]) -> list[Claim]:
    """The shortest measured length from which native attention is faster than dense."""
    claims = []
    for direction in LIMITS:
        mine = [row for row in rows if row.side == "native" and row.direction == direction]
        slower = [row.shape.q_tokens for row in mine if row.ratio_to("dense").median >= 1]
        faster = [row.shape.q_tokens for row in mine if row.shape.q_tokens > max(slower, default=0)]
        text = f"from {min(faster)} tokens on" if faster else "at no measured length"
        topic = f"native sparse attention faster than dense, {direction}"
        verdict = Verdict.PASS if faster else Verdict.FAIL
        claims.append(Claim(topic, "stated, not promised", text, verdict))
    return claims


def _growth(rows: list[BenchmarkRow]) -> list[Claim]:
    by_length = {
        row.shape.q_tokens: row.temp_bytes
        for row in rows
        if row.side == "native" and row.direction == "forward+backward"
    }
    small, large = by_length.get(4096), by_length.get(16384)
    if not small or not large:
        return []
    text = f"{large / small:.2f} ({format_bytes(small)} to {format_bytes(large)})"
    verdict = Verdict.PASS if large / small <= GROWTH_LIMIT else Verdict.FAIL
    topic = "temporary memory of native sparse attention, forward+backward, 4k to 16k tokens"
    return [Claim(topic, f"linear: factor <= {GROWTH_LIMIT}", text, verdict)]


if __name__ == "__main__":
    command("native_sparse", measure, __doc__)
