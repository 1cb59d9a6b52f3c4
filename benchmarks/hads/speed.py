"""Attention of all layers of SmolLM2 at 8192 tokens: by plans, choosing included, and dense.

python -m benchmarks.hads.speed             # needs the model and the plans of results/hads
python -m benchmarks.hads.speed --rounds 5
"""

import time
import uuid

import jax
import jax.numpy as jnp

from benchmarks.experiments.common import RESULTS, Outcome, Settings, command, plain_row
from benchmarks.hads.corpus import documents
from benchmarks.peers.models import directory
from xsake.benchmarking import (
    Claim,
    Ratio,
    Shape,
    Spread,
    TimedSide,
    check_limit,
    interleave,
    pair_ratio,
)
from xsake.benchmarking.rows import TimingStats
from xsake.hads import PlanAttention, SparsityPlan
from xsake.masks import Causal
from xsake.model import AttentionFn, DenseAttention, LayerCall
from xsake.model.huggingface import load
from xsake.model.observer import Observer
from xsake.model.tokenizer import Tokenizer

PLANS = ("plan_8192_64_25", "plan_8192_64_30", "plan_8192_64_35", "plan_4096_64", "plan_4096_32")
LIMIT = 0.45
DENSE = "dense"


def measure(settings: Settings) -> Outcome:
    """All sides over all layers, interleaved, on what the model really feeds them."""
    folder = directory(peers_dir=settings.peers_dir)
    plans = {name: SparsityPlan.load(RESULTS / "hads" / f"{name}.json") for name in PLANS}
    (tokens,) = settings.choose([8192])
    text = next(x for x in documents(Tokenizer.load(folder)) if x.split == "test")
    keep = lambda q, k, v, call: (q, k, v)
    seen = Observer(load(folder).model)(jnp.asarray(text.tokens[None, :tokens]), keep)
    attends: dict[str, AttentionFn] = {DENSE: DenseAttention()}
    attends |= {name: PlanAttention(plan) for name, plan in plans.items()}
    runs = {name: _attention_of_all(attend, seen) for name, attend in attends.items()}
    sides = [TimedSide(name, run) for name, run in runs.items()]
    times = interleave(sides, rounds=settings.rounds, warmup=1)
    q, k = seen[0], seen[1]
    shape = Shape(q_tokens=tokens, kv_tokens=tokens, q_heads=q.shape[3], kv_heads=k.shape[3],
                  head_dim=q.shape[4])  # fmt: skip
    run, rows, claims = uuid.uuid4().hex[:12], [], []
    for name in attends:
        plan, ratios = plans.get(name), ()
        if plan is not None:
            ratio = pair_ratio(times[name], times[DENSE])
            ratios = (Ratio(baseline=DENSE, **vars(ratio)),)
            topic = f"attention of {len(q)} layers, {tokens} tokens, {name}: {plan.policy.name}"
            promise = f"<= {LIMIT:.2f}x of dense XSAKE's time"
            claims.append(Claim(topic, promise, ratio.describe(), check_limit(ratio, LIMIT)))
        rows.append(plain_row(
            "attention by a plan", run, shape, settings, side=name,
            implementation=f"{type(attends[name]).__name__}, {len(q)} layers", mask="causal",
            layout="causal" if plan is None else plan.summary,
            budget=1.0 if plan is None else plan.budget,
            block_q=plan and plan.block, block_kv=plan and plan.block, repeats=settings.rounds,
            seconds=TimingStats(**vars(Spread.of(times[name]))), ratios=ratios,
        ))  # fmt: skip
    return rows, claims


def _attention_of_all(attend: AttentionFn, seen):
    """A function that runs every layer's attention once and returns the seconds."""

    @jax.jit
    def attention(q, k, v, layer):
        return attend(q, k, v, LayerCall(layer=layer, mask=Causal(), scale=q.shape[-1] ** -0.5))

    def run() -> float:
        total = 0.0
        for layer in range(len(seen[0])):
            own = jax.block_until_ready([x[layer] for x in seen])
            begin = time.perf_counter()
            jax.block_until_ready(attention(*own, jnp.asarray(layer)))
            total += time.perf_counter() - begin
        return total

    return run


if __name__ == "__main__":
    command("hads/speed", measure, __doc__)
