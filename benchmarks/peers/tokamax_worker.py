"""tokamax.dot_product_attention by the implementations that run on a CPU, causal."""

import functools
import importlib.metadata

import jax
import numpy as np
import tokamax

from benchmarks.peers.jax_call import prepare_jax
from benchmarks.peers.protocol import Prepared


def versions() -> dict[str, str]:
    """What is measured."""
    return {"tokamax": importlib.metadata.version("tokamax"), "jax": jax.__version__}


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """The causal call, `[B, T, H, D]` as ours; it takes no block grid on CPU."""
    if case["grid"] is not None:
        raise ValueError("tokamax has no block grid on a CPU")
    attend = functools.partial(
        tokamax.dot_product_attention, is_causal=True, implementation=case["call"]
    )
    return prepare_jax(attend, arrays, case)
