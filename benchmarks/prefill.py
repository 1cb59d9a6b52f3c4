"""SmolLM2 reads 8192 tokens: its attention dense through XSAKE, by a plan, and through jax.nn.

python -m benchmarks.prefill             # needs the model: python -m benchmarks.smollm2
python -m benchmarks.prefill --quick     # and the plan: python -m benchmarks.hads.end_to_end
"""

import contextlib
import tempfile
import time
import uuid
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.experiment import BLOCK, RESULTS, ROOT, Outcome, Settings, command, plain_row
from benchmarks.hads.corpus import documents
from benchmarks.peers import prefill_worker
from benchmarks.peers.client import Worker
from benchmarks.peers.recipes import interpreter
from benchmarks.smollm2 import directory
from xsake.bench import BenchmarkRow, Claim, Shape, Side, Spread, Verdict, interleave, judge
from xsake.bench import environment as facts_of_this_run
from xsake.bench.rows import Ratio, Timing
from xsake.bench.runner import pair_ratio
from xsake.bench.table import format_bytes
from xsake.hads import SparsityPlan
from xsake.masks import Causal
from xsake.model import LayerCall
from xsake.model.huggingface import load
from xsake.model.observer import Observer
from xsake.model.tokenizer import Tokenizer

OURS, PLANNED, THEIRS = "xsake", "plan", "jax.nn"
TITLES = {
    OURS: "xsake.attention",
    PLANNED: "xsake.hads.Planned",
    THEIRS: "jax.nn.dot_product_attention",
}
PLAN = RESULTS / "hads" / "plan_8192_128.json"
SPEED_LIMIT = 1 / 1.5
MEMORY_LIMIT = 1 / 5
PLAN_LIMIT = 0.45
TOLERANCE = 1e-4
MOST_ROUNDS = 3  # a round takes three minutes
LAYERS = range(0, 30, 5)  # whose attention is timed alone


def measure(settings: Settings) -> Outcome:
    """All sides interleaved, whole model and attention alone, then the compiler's bytes."""
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
    alone = _attention_alone(run, model, read, shape, settings)
    rows = _race(run, model, read, shape, settings)
    return [*rows, *alone], [*_claims(rows, alone, tokens)]


def _claims(rows: list[BenchmarkRow], alone: list[BenchmarkRow], tokens: int) -> list[Claim]:
    ours = rows[0]
    ratio = ours.ratio_to(THEIRS)
    verdict = judge(ratio, SPEED_LIMIT) if ours.is_correct else Verdict.FAIL
    topic = f"prefill of {tokens} tokens"
    promise = f"<= {SPEED_LIMIT:.2f}x of jax.nn's time"
    speed = Claim(f"{topic}, dense", promise, ratio.describe(), verdict)
    mine, other = (alone[place].temp_bytes or 0 for place in (0, 2))
    memory = Claim(
        f"attention of one layer, {tokens} tokens",
        f"<= {MEMORY_LIMIT:.0%} of jax.nn's bytes",
        f"{mine / other:.2%} ({format_bytes(mine)} of {format_bytes(other)})",
        Verdict.PASS if mine <= MEMORY_LIMIT * other else Verdict.FAIL,
    )
    ratio = alone[1].ratio_to(OURS)
    promise = f"<= {PLAN_LIMIT:.2f}x of dense XSAKE's time"
    attention = Claim(f"attention by a plan, {tokens} tokens", promise, ratio.describe(),
                      judge(ratio, PLAN_LIMIT))  # fmt: skip
    return [speed, memory, attention]


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
            case = {"model": str(model), "call": side, "plan": str(PLAN)}
            facts[side] = worker.compile(side, case)
            logits[side] = worker.check(side)["logits"]
        sides = [Side(side, lambda side=side: workers[side].run(side)) for side in TITLES]
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
    seconds = Timing(**vars(Spread.of(times[side])))
    return row.model_copy(update={"seconds": seconds, "repeats": rounds, "ratios": ratios})


def _attention_alone(
    run: str, model: Path, tokens: np.ndarray, shape: Shape, settings: Settings
) -> list[BenchmarkRow]:
    """Attention of some layers on what the model really feeds them, choosing blocks included."""
    keep = lambda q, k, v, call: (q, k, v)
    seen = Observer(load(model).model)(jnp.asarray(tokens), keep)
    layers = [(layer, *(x[layer] for x in seen)) for layer in LAYERS]
    del seen
    compiled = {side: _compiled(side, layers[0]) for side in TITLES}

    def run_layers(side: str) -> float:
        begin = time.perf_counter()
        for layer, *arrays in layers:
            jax.block_until_ready(compiled[side](*arrays, jnp.asarray(layer)))
        return time.perf_counter() - begin

    sides = [Side(side, lambda side=side: run_layers(side)) for side in TITLES]
    times = interleave(sides, rounds=settings.rounds, warmup=1)
    what = f"attention of {len(LAYERS)} layers"
    return [
        _timed(_row(run, what, side, shape, settings), side, times, settings.rounds).model_copy(
            update={"temp_bytes": int(compiled[side].memory_analysis().temp_size_in_bytes)}
        )
        for side in TITLES
    ]


def _compiled(side: str, layer):
    attend = prefill_worker.attention_of(side, PLAN)

    def attention(q, k, v, number):
        scale = q.shape[-1] ** -0.5
        return attend(q, k, v, LayerCall(layer=number, mask=Causal(), scale=scale))

    _, *arrays = layer
    return jax.jit(attention).lower(*arrays, jnp.asarray(0)).compile()


def _row(run: str, what: str, side: str, shape: Shape, settings: Settings) -> BenchmarkRow:
    block = {OURS: BLOCK, THEIRS: None}.get(side)
    budget, layout = 1.0, "causal" if side == OURS else "none"
    if side == PLANNED:
        plan = SparsityPlan.load(PLAN)
        block, budget, layout = plan.block, plan.budget, plan.summary
    return plain_row(
        "prefill", run, shape, settings,
        side=side if what == "prefill" else f"{side}, {what}",
        implementation=f"SmolLM2-135M with {TITLES[side]}" if what == "prefill" else TITLES[side],
        mask="causal", layout=layout, budget=budget, block_q=block, block_kv=block,
    )  # fmt: skip


if __name__ == "__main__":
    command("prefill", measure, __doc__)
