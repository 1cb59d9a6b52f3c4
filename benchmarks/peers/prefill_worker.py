"""A model reading one prompt, its attention dense or by a plan; a side per process."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.peers.protocol import Prepared
from xsake.attention import BlockSparseAttention
from xsake.hads import PlanAttention, SparsityPlan
from xsake.model import AttentionFn, Decoder, DenseAttention
from xsake.model.huggingface import load


def attention_of(implementation: str, plan: str | Path | None = None) -> AttentionFn:
    """Return the attention of a side: dense, or by a plan."""
    operator = BlockSparseAttention(implementation=implementation)
    if plan is None:
        return DenseAttention(operator)
    return PlanAttention(SparsityPlan.load(Path(plan)), operator=operator)


def versions() -> dict[str, str]:
    """What is measured."""
    return {"jax": jax.__version__}


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Load the model, compile the prefill and say what memory it takes."""
    graph, weights = nnx.split(load(case["model"]).model)
    attend = attention_of(case["implementation"], case.get("plan"))
    tokens = jnp.asarray(arrays["tokens"])

    def prefill(weights, tokens):
        model: Decoder = nnx.merge(graph, weights)
        lengths = jnp.full((tokens.shape[0],), tokens.shape[1])
        hidden, cache = model.prefill(tokens, lengths, capacity=tokens.shape[1], attend=attend)
        return {"logits": model.logits(hidden[:, -1]), "pages": (cache.pages.k, cache.pages.v)}

    compiled = jax.jit(prefill).lower(weights, tokens).compile()
    facts = {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes}

    def run():
        before = forget_peak()
        out = jax.block_until_ready(compiled(weights, tokens))
        facts["peak_bytes"] = resident_bytes("VmHWM") - before
        return out

    return Prepared(run, lambda out: {"logits": np.asarray(out["logits"])}, facts)


def forget_peak() -> int:
    """Start a new peak of resident memory; returns what is resident now. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident_bytes("VmRSS")


def resident_bytes(which: str) -> int:
    """A line of this process's status: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))
