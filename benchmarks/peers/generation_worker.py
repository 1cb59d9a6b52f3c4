"""A model generating greedily from one prompt; `new` is the number of tokens."""

import jax
import numpy as np

import xsake
from benchmarks.peers.protocol import Prepared
from benchmarks.peers.xsake_worker import versions
from xsake.model import DenseAttention
from xsake.model.generate import GenerationOptions, generate
from xsake.model.huggingface import load

__all__ = ["prepare", "start", "versions"]


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Prefill and `new - 1` steps; the call names a backend, or none."""
    model, prompt = load(case["model"]).model, arrays["tokens"][0, : case["prompt"]]
    named = None if case["call"] == "xsake" else case["call"].removeprefix("xsake.")
    attend = DenseAttention(xsake.BlockSparseAttention(implementation=named))
    options = GenerationOptions(max_new_tokens=case["new"], temperature=0)
    run = lambda: generate(model, [prompt], options, attend=attend)
    facts = {"device": jax.devices()[0].device_kind}
    return Prepared(run, lambda found: {"tokens": np.array(found.rows[0].tokens)}, facts)
