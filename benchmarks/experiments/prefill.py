"""SmolLM2 reads 8192 tokens: its attention dense through XSAKE, by two plans, and through jax.nn.

python -m benchmarks.experiments.prefill  # needs the model: benchmarks.peers.models
python -m benchmarks.experiments.prefill --quick  # and the plan: benchmarks.hads.end_to_end
"""

import contextlib
import tempfile
import uuid
from pathlib import Path

import jax
import numpy as np

from benchmarks.experiments.common import (
    BLOCK,
    RESULTS,
    ROOT,
    Outcome,
    Settings,
    command,
    plain_row,
)
from benchmarks.hads.corpus import documents
from benchmarks.peers import prefill_worker
from benchmarks.peers.client import Worker
from benchmarks.peers.models import directory
from benchmarks.peers.recipes import interpreter
from xsake._format import format_bytes
from xsake._provenance import environment as facts_of_this_run
from xsake.benchmarking import (
    BenchmarkRow,
    Claim,
    Shape,
    Spread,
    TimedSide,
    Verdict,
    check_limit,
    interleave,
)
from xsake.benchmarking.rows import Ratio, TimingStats
from xsake.benchmarking.runner import pair_ratio
from xsake.hads import SparsityPlan
from xsake.masks import Causal
from xsake.model import LayerCall
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

OURS, THEIRS = "xsake", "jax.nn"
PLANS = {name: RESULTS / "hads" / f"{name}.json" for name in ("plan_8192_128", "plan_4096_64")}
TITLES = {
    OURS: "xsake.attention",
    **dict.fromkeys(PLANS, "xsake.hads.PlanAttention"),
    THEIRS: "jax.nn.dot_product_attention",
}
SPEED_LIMIT = 1 / 1.5
MEMORY_LIMIT = 1 / 5
TOLERANCE = 1e-4
MOST_ROUNDS = 3  # a round takes three minutes


def measure(settings: Settings) -> Outcome:
    """All sides interleaved, then the compiler's bytes for one layer's attention alone."""
    model = directory(peers_dir=settings.peers_dir)
    config = load(model).config
    (tokens,) = settings.choose([8192])
    shape = Shape(
        q_tokens=tokens,
        kv_tokens=tokens,
        q_heads=config.q_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )
    text = next(x for x in documents(Tokenizer.load(model)) if x.split == "test")
    read, run = text.tokens[None, :tokens], uuid.uuid4().hex[:12]
    rows = _race(run, model, read, shape, settings)
    ratio = rows[0].ratio_to(THEIRS)
    verdict = check_limit(ratio, SPEED_LIMIT) if rows[0].is_correct else Verdict.FAIL
    speed = Claim(
        f"prefill of {tokens} tokens, dense",
        f"<= {SPEED_LIMIT:.2f}x of jax.nn's time",
        ratio.describe(),
        verdict,
    )
    alone = {side: _attention_row(run, side, shape, settings) for side in (OURS, THEIRS)}
    mine, other = (alone[side].temp_bytes or 0 for side in (OURS, THEIRS))
    memory = Claim(
        f"attention of one layer, {tokens} tokens",
        f"<= {MEMORY_LIMIT:.0%} of jax.nn's bytes",
        f"{mine / other:.2%} ({format_bytes(mine)} of {format_bytes(other)})",
        Verdict.PASS if mine <= MEMORY_LIMIT * other else Verdict.FAIL,
    )
    return [*rows, *alone.values()], [speed, memory]


def _race(
    run: str, model: Path, tokens: np.ndarray, shape: Shape, settings: Settings
) -> list[BenchmarkRow]:
    """The whole model reads, a process for each side."""
    rounds = min(settings.rounds, MOST_ROUNDS)
    began = facts_of_this_run(ROOT)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        np.save(Path(folder, "tokens.npy"), tokens)
        python = interpreter(None, settings.peers_dir)
        workers = {
            side: stack.enter_context(
                Worker(python, "prefill_worker", threads=settings.threads, is_isolated=False)
            )
            for side in TITLES
        }
        facts, logits = {}, {}
        for side, worker in workers.items():
            worker.load(Path(folder))
            case = {"model": str(model), "call": side}
            if side in PLANS:
                case |= {"call": "plan", "plan": str(PLANS[side])}
            facts[side] = worker.compile(side, case)
            logits[side] = worker.check(side)["logits"]
        sides = [TimedSide(side, lambda side=side: workers[side].run(side)) for side in TITLES]
        times = interleave(sides, rounds=rounds, warmup=0)
    gap = np.abs(logits[OURS] - logits[THEIRS]).max() / np.abs(logits[THEIRS]).max()
    assert all(np.isfinite(x).all() for x in logits.values()), "a side returned what is no number"
    return [
        _timed(_row(run, "prefill", side, shape, settings), side, times, rounds).model_copy(
            update={
                "load_average": began.load_average,
                "compile_seconds": facts[side]["compile_seconds"],
                "temp_bytes": facts[side]["temp_bytes"],
                "peak_bytes": facts[side]["peak_bytes"],
                "max_error": float(gap) if side == OURS else None,
                "is_correct": bool(gap <= TOLERANCE) if side == OURS else None,
            }
        )
        for side in TITLES
    ]


def _timed(row: BenchmarkRow, side: str, times: dict[str, list[float]], rounds: int):
    ratios = tuple(
        Ratio(baseline=other, **vars(pair_ratio(times[side], times[other])))
        for other in times
        if other != side
    )
    seconds = TimingStats(**vars(Spread.of(times[side])))
    return row.model_copy(update={"seconds": seconds, "repeats": rounds, "ratios": ratios})


def _attention_row(run: str, side: str, shape: Shape, settings: Settings) -> BenchmarkRow:
    """The compiler's temporary bytes for the attention of one layer; nothing is run."""
    call = LayerCall(layer=0, mask=Causal(), scale=shape.head_dim**-0.5)
    sizes = [
        jax.ShapeDtypeStruct((shape.batch, shape.q_tokens, heads, shape.head_dim), "float32")
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    ]
    attend = prefill_worker.attention_of(side)
    compiled = jax.jit(lambda q, k, v: attend(q, k, v, call)).lower(*sizes).compile()
    bytes_planned = int(compiled.memory_analysis().temp_size_in_bytes)
    row = _row(run, "attention of one layer", side, shape, settings)
    return row.model_copy(update={"temp_bytes": bytes_planned})


def _row(run: str, what: str, side: str, shape: Shape, settings: Settings) -> BenchmarkRow:
    block = {OURS: BLOCK, THEIRS: None}.get(side)
    budget, layout = 1.0, "causal" if side == OURS else "none"
    if side in PLANS:
        plan = SparsityPlan.load(PLANS[side])
        block, budget, layout = plan.block, plan.budget, plan.summary
    return plain_row(
        "prefill", run, shape, settings,
        side=side if what == "prefill" else f"{side}, {what}",
        implementation=f"SmolLM2-135M with {TITLES[side]}" if what == "prefill" else TITLES[side],
        mask="causal", layout=layout, budget=budget, block_q=block, block_kv=block,
    )  # fmt: skip


if __name__ == "__main__":
    command("prefill", measure, __doc__)
