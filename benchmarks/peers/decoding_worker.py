"""Greedy decoding steps after a prompt that was processed before, dense or by a plan.

It runs with earlier versions of the package as well.
"""

import dataclasses
import functools
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.peers.protocol import Prepared
from benchmarks.peers.xsake_worker import versions
from xsake.model import Decoder
from xsake.model.huggingface import load

__all__ = ["prepare", "start", "versions"]


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Process the prompt; a run decodes `new` tokens of `batch` rows that all have it."""
    graph, weights = nnx.split(load(case["model"]).model)
    prompt = jnp.asarray(arrays["tokens"][:1, : case["prompt"]])
    new, batch = case["new"], case["batch"]
    options: dict[str, Any] = {}
    if case.get("plan"):
        from xsake.hads import PlanDecoding, SparsityPlan

        plan = SparsityPlan.load(Path(case["plan"]))
        options["attend"] = PlanDecoding(plan, case["budget"])
    name = "capacity" if "capacity" in inspect.signature(Decoder.prefill).parameters else "room"

    @jax.jit
    def prefill(weights, prompt):
        model: Decoder = nnx.merge(graph, weights)
        lengths = jnp.full(1, prompt.shape[1])
        hidden, cache = model.prefill(prompt, lengths, **{name: prompt.shape[1] + new})
        return model.logits(hidden[:, -1]).argmax(-1), cache

    @functools.partial(jax.jit, donate_argnums=2)
    def extend(weights, token, cache):
        model: Decoder = nnx.merge(graph, weights)
        hidden, cache = model.extend(token[:, None], cache, **options)
        return model.logits(hidden[:, 0]).argmax(-1), cache

    first, cache = prefill(weights, prompt)
    first, state = jnp.repeat(first, batch), [_repeat(cache, batch)]
    if options:
        state = [state[0].with_selector(options["attend"].page_selector)]

    def run() -> np.ndarray:
        lengths = jnp.full(batch, prompt.shape[1], jnp.int32)
        token, cache = first, dataclasses.replace(state.pop(), lengths=lengths)
        tokens = [np.asarray(token)]
        for _ in range(new):
            token, cache = extend(weights, token, cache)
            tokens.append(np.asarray(token))
        state.append(cache)
        return np.stack(tokens, axis=1)

    return Prepared(run, lambda tokens: {"tokens": tokens})


def _repeat(cache: Any, batch: int) -> Any:
    """Return a cache with the same row several times, each with pages of its own."""
    if batch == 1:
        return cache

    def repeat(arrays: Any) -> Any:
        return jax.tree.map(lambda x: jnp.tile(x, (1, batch, *[1] * (x.ndim - 2))), arrays)

    if not hasattr(cache, "pages"):  # 0.1.0
        return dataclasses.replace(cache, keys=repeat(cache.keys), values=repeat(cache.values))
    count = cache.page_table.shape[1]
    table = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)
    return dataclasses.replace(cache, pages=repeat(cache.pages), page_table=table)
