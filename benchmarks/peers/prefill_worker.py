"""A model reading one prompt, its attention dense or by a plan or by jax.nn; a side per process."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.peers.protocol import Prepared
from xsake.hads import PlanAttention, SparsityPlan
from xsake.masks import Causal
from xsake.model import AttentionFn, Decoder, DenseAttention, LayerCall
from xsake.model.huggingface import load


def dense_by_jax(q, k, v, call: LayerCall):
    """`jax.nn.dot_product_attention` as the decoder's attention; plain causal layers only."""
    assert call.mask == Causal(), call.mask
    return jax.nn.dot_product_attention(q, k, v, scale=call.scale, is_causal=True)


def attention_of(call: str, plan: str | Path | None = None) -> AttentionFn:
    """The attention that a side runs with; only `plan` reads a plan."""
    match call:
        case "xsake":
            return DenseAttention()
        case "jax.nn":
            return dense_by_jax
        case "plan":
            assert plan is not None
            return PlanAttention(SparsityPlan.load(Path(plan)))
    raise ValueError(call)


def versions() -> dict[str, str]:
    """What is measured."""
    return {"jax": jax.__version__}


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Load the model, compile the prefill and say what memory it takes."""
    graph, weights = nnx.split(load(case["model"]).model)
    attend = attention_of(case["call"], case.get("plan"))
    tokens = jnp.asarray(arrays["tokens"])

    def prefill(weights, tokens):
        model: Decoder = nnx.merge(graph, weights)
        lengths = jnp.full((tokens.shape[0],), tokens.shape[1])
        hidden, cache = model.prefill(tokens, lengths, capacity=tokens.shape[1], attend=attend)
        return {"logits": model.logits(hidden[:, -1]), "keys": cache.keys, "values": cache.values}

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
