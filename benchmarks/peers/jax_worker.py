"""jax.nn.dot_product_attention, causal, forward and backward."""

import functools

import jax
import numpy as np

from benchmarks.peers.jax_call import prepare_jax
from benchmarks.peers.protocol import GEMM_SIZE, Prepared


def versions() -> dict[str, str]:
    """What is measured."""
    return {"jax": jax.__version__}


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """The dense causal call; it has no block grid."""
    if case["call"] in ("gemm", "openblas"):
        x = np.random.default_rng(0).standard_normal((GEMM_SIZE, GEMM_SIZE), np.float32)
        y, multiply = jax.numpy.asarray(x), jax.jit(jax.numpy.matmul)
        run = lambda: x @ x if case["call"] == "openblas" else multiply(y, y).block_until_ready()
        return Prepared(run, lambda _: {})
    if case["grid"] is not None:
        raise ValueError("jax.nn has no block grid")
    is_causal = arrays["q"].shape[1] > 1  # one query sees all keys
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal)
    return prepare_jax(attend, arrays, case)
