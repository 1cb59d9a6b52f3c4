"""Selected attention by the native kernels of the distribution `xsake-cpu`.

The kernels gather the queries that selected a block; their softmax states stay in scratch, so there
are no partial results to merge. Block lists are checked by the handlers.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from xsake.kernels import native_library
from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs


def unsupported_reason(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if inputs.q.dtype.name in native_library.DTYPES:
        return None
    return f"it computes in float32, and q is {inputs.q.dtype.name}"


def forward(inputs: SelectedInputs, config: SelectedConfig, platform: str) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    q, _, v, *_ = inputs
    results = (
        jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype),
        jax.ShapeDtypeStruct(q.shape[:3], jnp.float32),
    )
    o, lse = _call("selected", inputs, config, (), results)
    return o, lse


def backward(
    inputs: SelectedInputs, config: SelectedConfig, platform: str, *residuals: Array
) -> Gradients:
    """Gradients for q, k and v from (o, lse, do, dlse)."""
    o, lse, do, dlse = residuals
    results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs[:3])
    arrays = o, lse.astype(jnp.float32), do.astype(inputs.q.dtype), dlse.astype(jnp.float32)
    dq, dk, dv = _call("selected_backward", inputs, config, arrays, results)
    return Gradients(dq, dk, dv)


def _call(
    name: str,
    inputs: SelectedInputs,
    config: SelectedConfig,
    residuals: tuple[Array, ...],
    results: tuple[jax.ShapeDtypeStruct, ...],
) -> Sequence[Array]:
    positions = native_library.or_empty(inputs.q_positions, 2, jnp.int32)
    lists = (x.astype(jnp.int32) for x in (inputs.blocks, positions))
    return native_library.call(
        name, (*inputs[:3], *lists, *residuals), results,
        sizes=native_library.sizes_of(inputs.q, inputs.v)
        | {"block_kv": config.block, "num_slots": inputs.blocks.shape[-1]},
        scale=np.float32(config.scale), block=config.block,
    )  # fmt: skip
