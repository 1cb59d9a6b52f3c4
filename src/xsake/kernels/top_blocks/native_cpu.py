"""Scores and selection of blocks by the native kernels of the distribution `xsake-cpu`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from xsake.kernels import native_library
from xsake.kernels.top_blocks.types import TopBlocksConfig, TopBlocksInputs


def unsupported_reason(
    inputs: TopBlocksInputs, config: TopBlocksConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if inputs.q.dtype.name not in native_library.DTYPES:
        return f"it computes in float32, and q is {inputs.q.dtype.name}"
    if config.pooling != "max":
        return f"it scores single keys, and pooling is {config.pooling!r}"
    return None


def forward(
    inputs: TopBlocksInputs, config: TopBlocksConfig, platform: str
) -> Int[Array, "B Tq Hg Ns"]:
    """See `top_blocks`."""
    selection, groups = config.selection, config.groups
    q, k, weights = (
        native_library.or_empty(x, 3, jnp.float32).astype(jnp.float32) for x in inputs[:3]
    )
    bounds = (x.astype(jnp.int32) for x in inputs.bounds)
    shape = jax.ShapeDtypeStruct((*q.shape[:2], groups, selection.slots), jnp.int32)
    sizes = native_library.sizes_of(q, k)
    sizes |= {"v_dim": 0, "block_q": q.shape[2] // groups, "block_kv": selection.block}
    (blocks,) = native_library.call(
        "top_blocks", (q, k, weights, *bounds), [shape], sizes=sizes, block=selection.block,
        first=selection.first, local=selection.local, has_relu=config.has_relu,
    )  # fmt: skip
    return blocks
