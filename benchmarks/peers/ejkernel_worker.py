"""ejkernel's native sparse attention by XLA: the selected branch over given blocks."""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.native_sparse_attention import apply_native_sparse_attention

from benchmarks.peers.jax_call import prepare_jax
from benchmarks.peers.protocol import Prepared


def versions() -> dict[str, str]:
    """What is measured."""
    return {"ejkernel": importlib.metadata.version("ejkernel"), "jax": jax.__version__}


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Every token's blocks, -1 where a slot is not used, as its documentation says it.

    The scale is given, because its default cannot be traced.
    """
    blocks = jnp.asarray(arrays["blocks"])
    attend = functools.partial(
        apply_native_sparse_attention,
        block_indices=blocks,
        block_counts=blocks.shape[-1],
        block_size=case["block"],
        softmax_scale=arrays["q"].shape[-1] ** -0.5,
    )
    return prepare_jax(attend, arrays, case)
