"""SmolLM2 reads 8192 tokens: its dense attention through XSAKE, and through jax.nn.

python -m benchmarks.prefill             # needs the model: python -m benchmarks.smollm2
python -m benchmarks.prefill --quick
"""

import contextlib
import tempfile
import uuid
from pathlib import Path

import jax
import numpy as np

from benchmarks.experiment import BLOCK, ROOT, Outcome, Settings, command, plain_row
from benchmarks.peers import prefill_worker
from benchmarks.peers.client import Worker
from benchmarks.peers.recipes import interpreter
from benchmarks.smollm2 import directory
from xsake.bench import BenchmarkRow, Claim, Shape, Side, Spread, Verdict, interleave, judge
from xsake.bench import environment as facts_of_this_run
from xsake.bench.rows import Ratio, Timing
from xsake.bench.runner import pair_ratio
from xsake.bench.table import format_bytes
from xsake.masks import Causal
from xsake.model import LayerCall
from xsake.model.huggingface import load

OURS, THEIRS = "xsake", "jax.nn"
TITLES = {OURS: "xsake.attention", THEIRS: "jax.nn.dot_product_attention"}
SPEED_LIMIT = 1 / 1.5
MEMORY_LIMIT = 1 / 5
TOLERANCE = 1e-4
MOST_ROUNDS = 3  # a round takes three minutes


def measure(settings: Settings) -> Outcome:
    """Both sides interleaved, then the compiler's bytes for one layer's attention alone."""
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
    run = uuid.uuid4().hex[:12]
    rows = _race(run, model, shape, config.vocab_size, settings)
    ratio = rows[0].ratio_to(THEIRS)
    verdict = judge(ratio, SPEED_LIMIT) if rows[0].is_correct else Verdict.FAIL
    speed = Claim(
        f"prefill of {tokens} tokens, dense",
        f"<= {SPEED_LIMIT:.2f}x of jax.nn's time",
        ratio.describe(),
        verdict,
    )
    alone = {side: _attention_row(run, side, shape, settings) for side in TITLES}
    mine, other = (alone[side].temp_bytes or 0 for side in (OURS, THEIRS))
    memory = Claim(
        f"attention of one layer, {tokens} tokens",
        f"<= {MEMORY_LIMIT:.0%} of jax.nn's bytes",
        f"{mine / other:.2%} ({format_bytes(mine)} of {format_bytes(other)})",
        Verdict.PASS if mine <= MEMORY_LIMIT * other else Verdict.FAIL,
    )
    return [*rows, *alone.values()], [speed, memory]


def _race(
    run: str, model: Path, shape: Shape, vocab_size: int, settings: Settings
) -> list[BenchmarkRow]:
    rounds = min(settings.rounds, MOST_ROUNDS)
    random = np.random.default_rng(settings.seed)
    tokens = random.integers(0, vocab_size, (shape.batch, shape.q_tokens), np.int32)
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
            facts[side] = worker.compile(side, {"model": str(model), "call": side})
            logits[side] = worker.check(side)["logits"]
        sides = [Side(side, lambda side=side: workers[side].run(side)) for side in TITLES]
        times = interleave(sides, rounds=rounds, warmup=0)
    gap = np.abs(logits[OURS] - logits[THEIRS]).max() / np.abs(logits[THEIRS]).max()
    assert np.isfinite(gap), "a side returned what is no number"
    return [
        _row(run, "prefill", side, shape, settings).model_copy(
            update={
                "load_average": began.load_average,
                "seconds": Timing(**vars(Spread.of(times[side]))),
                "repeats": rounds,
                "ratios": (_ratio(times, side),),
                "compile_seconds": facts[side]["compile_seconds"],
                "temp_bytes": facts[side]["temp_bytes"],
                "peak_bytes": facts[side]["peak_bytes"],
                "max_error": float(gap) if side == OURS else None,
                "is_correct": bool(gap <= TOLERANCE) if side == OURS else None,
            }
        )
        for side in TITLES
    ]


def _ratio(times: dict[str, list[float]], side: str) -> Ratio:
    other = THEIRS if side == OURS else OURS
    return Ratio(baseline=other, **vars(pair_ratio(times[side], times[other])))


def _attention_row(run: str, side: str, shape: Shape, settings: Settings) -> BenchmarkRow:
    """The compiler's temporary bytes for the attention of one layer; nothing is run."""
    call = LayerCall(layer=0, mask=Causal(), scale=shape.head_dim**-0.5)
    sizes = [
        jax.ShapeDtypeStruct((shape.batch, shape.q_tokens, heads, shape.head_dim), "float32")
        for heads in (shape.q_heads, shape.kv_heads, shape.kv_heads)
    ]
    attend = prefill_worker.ATTENTIONS[side]
    compiled = jax.jit(lambda q, k, v: attend(q, k, v, call)).lower(*sizes).compile()
    bytes_planned = int(compiled.memory_analysis().temp_size_in_bytes)
    row = _row(run, "attention of one layer", side, shape, settings)
    return row.model_copy(update={"temp_bytes": bytes_planned})


def _row(run: str, what: str, side: str, shape: Shape, settings: Settings) -> BenchmarkRow:
    is_ours = side == OURS
    return plain_row(
        "prefill", run, shape, settings,
        side=side if what == "prefill" else f"{side}, {what}",
        implementation=f"SmolLM2-135M with {TITLES[side]}" if what == "prefill" else TITLES[side],
        mask="causal", layout="causal" if is_ours else "none", budget=1.0,
        block_q=BLOCK if is_ours else None, block_kv=BLOCK if is_ours else None,
    )  # fmt: skip


if __name__ == "__main__":
    command("prefill", measure, __doc__)
