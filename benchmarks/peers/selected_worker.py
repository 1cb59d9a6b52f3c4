"""Our selected branch over given blocks, under the same protocol as every peer."""

import functools

import jax.numpy as jnp
import numpy as np

from benchmarks.peers.jax_call import prepare_jax
from benchmarks.peers.protocol import Prepared
from benchmarks.peers.xsake_worker import start, versions
from xsake import nsa

__all__ = ["prepare", "start", "versions"]


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """Every token's blocks, -1 where a slot is not used."""
    attend = functools.partial(
        nsa.selected_attention,
        block_indices=jnp.asarray(arrays["blocks"]),
        block_size=case["block"],
    )
    return prepare_jax(attend, arrays, case)
