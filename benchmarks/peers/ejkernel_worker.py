"""ejkernel by XLA: block-sparse attention, and native sparse attention over given blocks."""

import functools
import importlib.metadata

import jax
import jax.numpy as jnp
import numpy as np
from ejkernel.kernels._xla.blocksparse_attention import blocksparse_attention
from ejkernel.kernels._xla.native_sparse_attention import apply_native_sparse_attention

from benchmarks.peers.jax_call import Attend, prepare_jax
from benchmarks.peers.protocol import Prepared


def versions() -> dict[str, str]:
    """What is measured."""
    return {"ejkernel": importlib.metadata.version("ejkernel"), "jax": jax.__version__}


def start(threads: int) -> None:
    """XLA sizes its pool by the cores the process may use, which are set already."""


def prepare(arrays: dict[str, np.ndarray], case: dict) -> Prepared:
    """The call that is asked for; native sparse attention unless another one is."""
    make = _block_sparse if case.get("call") == "blocksparse" else _native_sparse
    return prepare_jax(make(arrays, case), arrays, case)


def _block_sparse(arrays: dict[str, np.ndarray], case: dict) -> Attend:
    """A mask of tokens, because its XLA backend reads no block lists (`qkv_layouts` is unused).

    Of a mask that differs by head it takes the first head's for all; so heads are batches here.
    """
    if case["grid"] is None:
        raise ValueError("block-sparse attention without a grid")
    ones = np.ones((case["block"], case["block"]), bool)
    _, tokens, heads, _ = arrays["q"].shape
    listed = np.stack([np.kron(grid, ones)[:tokens, :tokens] for grid in arrays[case["grid"]]])
    mask = jnp.asarray(listed & np.tri(tokens, dtype=bool))[:, None]

    def attend(q, k, v):
        apart = [jnp.swapaxes(x, 1, 2).reshape(heads, 1, tokens, -1) for x in (q, k, v)]
        out = blocksparse_attention(*apart, attention_mask=mask, causal=True)
        return jnp.swapaxes(out.reshape(1, heads, tokens, -1), 1, 2)

    return attend


def _native_sparse(arrays: dict[str, np.ndarray], case: dict) -> Attend:
    """Every token's blocks, -1 where a slot is not used, as its documentation says it.

    The scale is given, because its default cannot be traced.
    """
    blocks = jnp.asarray(arrays["blocks"])
    return functools.partial(
        apply_native_sparse_attention,
        block_indices=blocks,
        block_counts=blocks.shape[-1],
        block_size=case["block"],
        softmax_scale=arrays["q"].shape[-1] ** -0.5,
    )
