"""SmolLM2 reads 8192 tokens: its attention dense and by plans, on each backend of this CPU.

python -m benchmarks.experiments.prefill  # needs the model: benchmarks.peers.models
python -m benchmarks.experiments.prefill --quick  # and the plans: benchmarks.hads.plans

Selection of blocks is part of the time. Native kernels take part if xsake-cpu is installed.
"""

import contextlib
import tempfile
import uuid
from pathlib import Path
from typing import NamedTuple

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
from benchmarks.peers.client import Worker
from benchmarks.peers.models import directory
from benchmarks.peers.recipes import interpreter
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
from xsake.kernels import native_library
from xsake.model.huggingface import load
from xsake.model.tokenizer import Tokenizer

PLANS = ("plan_8192_64_25", "plan_8192_64_30", "plan_8192_64_35", "plan_4096_64")
LIMIT = 0.62
TOLERANCE = 1e-4
# Selection of blocks uses every backend that it finds.
NO_NATIVE = {"XSAKE_CPU_LIBRARY": "none"}
MAX_ROUNDS = 5  # a round takes three minutes


class Side(NamedTuple):
    """A backend, with dense attention or a plan."""

    implementation: str
    plan: str | None = None

    @property
    def name(self) -> str:
        """Name in rows; those of `xla` are the names of earlier rows."""
        return (self.plan or "xsake") + ("" if self.implementation == "xla" else ", native_cpu")

    @property
    def dense(self) -> "Side":
        return Side(self.implementation)


def measure(settings: Settings) -> Outcome:
    """Interleave all sides; dense logits of two backends must agree."""
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
    backends = ["xla"] if native_library.missing_handler("forward") else ["xla", "native_cpu"]
    sides = [Side(backend, plan) for backend in backends for plan in (None, *PLANS)]
    rows = _race(model, text.tokens[None, :tokens], shape, settings, sides)
    claims = []
    for side, row in zip(sides, rows, strict=True):
        if side.plan is not None:
            ratio = row.ratio_to(side.dense.name)
            verdict = check_limit(ratio, LIMIT) if row.is_correct is not False else Verdict.FAIL
            topic = f"prefill of {tokens} tokens, {side.name}"
            promise = f"<= {LIMIT:.2f}x of the dense time on the same backend"
            claims.append(Claim(topic, promise, ratio.describe(), verdict))
    return rows, claims


def _race(
    model: Path, tokens: np.ndarray, shape: Shape, settings: Settings, sides: list[Side]
) -> list[BenchmarkRow]:
    """The whole model reads, a process for each side."""
    rounds, run = min(settings.rounds, MAX_ROUNDS), uuid.uuid4().hex[:12]
    began = facts_of_this_run(ROOT)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        np.save(Path(folder, "tokens.npy"), tokens)
        python = interpreter(None, settings.peers_dir)
        workers, facts, logits = {}, {}, {}
        for side in sides:
            worker = Worker(
                python, "prefill_worker", threads=settings.threads, is_isolated=False,
                variables=NO_NATIVE if side.implementation == "xla" else None,
            )  # fmt: skip
            workers[side] = stack.enter_context(worker)
            worker.load(Path(folder))
            case = {"model": str(model), "implementation": side.implementation}
            if side.plan is not None:
                case["plan"] = str(RESULTS / "hads" / f"{side.plan}.json")
            facts[side] = worker.compile(side.name, case)
            logits[side] = worker.check(side.name)["logits"]
        timed = [
            TimedSide(side.name, lambda side=side: workers[side].run(side.name)) for side in sides
        ]
        times = interleave(timed, rounds=rounds, warmup=0)
    assert all(np.isfinite(x).all() for x in logits.values()), "logits are not finite"
    truth = logits[sides[0]]
    rows = []
    for side in sides:
        gap = float(np.abs(logits[side] - truth).max() / np.abs(truth).max())
        is_checked = side.plan is None and side != sides[0]
        plan = SparsityPlan.load(RESULTS / "hads" / f"{side.plan}.json") if side.plan else None
        ratios = tuple(
            Ratio(baseline=other.name, **vars(pair_ratio(times[side.name], times[other.name])))
            for other in sides
            if other != side and other.implementation == side.implementation
        )
        rows.append(plain_row(
            "prefill", run, shape, settings, side=side.name,
            implementation=f"SmolLM2-135M, {side.implementation}", mask="causal",
            layout="causal" if plan is None else plan.summary,
            budget=1.0 if plan is None else plan.budget,
            block_q=plan.block if plan else BLOCK, block_kv=plan.block if plan else BLOCK,
            seconds=TimingStats(**vars(Spread.of(times[side.name]))), repeats=rounds,
            ratios=ratios, load_average=began.load_average,
            compile_seconds=facts[side]["compile_seconds"], temp_bytes=facts[side]["temp_bytes"],
            peak_bytes=facts[side]["peak_bytes"], max_error=gap if is_checked else None,
            is_correct=gap <= TOLERANCE if is_checked else None,
        ))  # fmt: skip
    return rows


if __name__ == "__main__":
    command("prefill", measure, __doc__)
