"""jax.nn.dot_product_attention, causal, forward and backward."""

import functools

import jax
import numpy as np

from benchmarks.peers.jax_call import prepare_jax
from benchmarks.peers.protocol import Prepared

attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)


def versions() -> dict[str, str]:
    """What is measured."""
    return {"jax": jax.__version__}


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """The dense causal call; it has no block grid."""
    if case["grid"] is not None:
        raise ValueError("jax.nn has no block grid")
    return prepare_jax(attend, arrays, case)
