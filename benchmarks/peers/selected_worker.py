"""Our selected branch over given blocks, under the same protocol as every peer."""

import functools

import jax.numpy as jnp
import numpy as np

import xsake
from benchmarks.peers.jax_call import prepare_jax
from benchmarks.peers.protocol import Prepared
from benchmarks.peers.xsake_worker import start, versions

__all__ = ["prepare", "start", "versions"]


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Every token's blocks, -1 where a slot is not used."""
    attend = functools.partial(
        xsake.apply_native_sparse_attention,
        block_indices=jnp.asarray(arrays["blocks"]),
        block_size=case["block"],
    )
    return prepare_jax(attend, arrays, case)
