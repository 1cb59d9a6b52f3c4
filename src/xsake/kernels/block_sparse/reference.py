"""Dense definition of block-sparse attention: truth at small sizes, O(Tq Tk) memory."""

import jax.numpy as jnp
from jax import Array

from xsake.kernels import reference_attention
from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, Gradients
from xsake.kernels.online_softmax import zero_nonfinite
from xsake.layout import BlockLayout


def unsupported_reason(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    return None if config.tiles is None else "it is dense, so it has no tiles to size"


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the forward and backward passes: all pairs."""
    return cost.dense(inputs)


def forward(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    mask = pair_mask(inputs)
    return reference_attention.forward(
        *inputs[:3], mask, config.scale, config.softcap, inputs.bias
    )[:2]


def backward(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str, *residuals: Array
) -> Gradients:
    """Gradients for q, k, v and bias from (o, lse, do, dlse)."""
    o, lse, do, dlse = residuals
    # A query whose cotangent is not finite reaches the keys that it sees, and no others.
    lse = jnp.where(jnp.isfinite(do).all(-1), lse, jnp.nan)
    residuals = o, lse, zero_nonfinite(do), dlse
    mask, numbers = pair_mask(inputs), (config.scale, config.softcap, inputs.bias)
    return reference_attention.backward(*inputs[:3], mask, residuals, *numbers)


def pair_mask(inputs: BlockSparseInputs) -> Array:
    """Visible pairs, bool [B, Hq, Tq, Tk]."""
    layout = inputs.layout
    batch, _, heads, _ = inputs.q.shape
    q_block = jnp.arange(layout.q_tokens) // layout.block_q
    kv_block = jnp.arange(layout.kv_tokens) // layout.block_kv
    mask, partial = (
        jnp.repeat(plane[:, :, q_block][..., kv_block], heads // layout.heads, axis=1)
        for plane in _block_planes(layout)
    )
    if layout.mask is not None:
        mask = mask & (~partial | reference_attention.mask_pairs(layout.mask, inputs))
    mask = mask & reference_attention.segment_pairs(inputs)
    return jnp.broadcast_to(mask, (batch, *mask.shape[1:]))


def _block_planes(layout: BlockLayout) -> Array:
    """(listed, partial), each bool [batch, heads, Nq, Nk]."""
    starts = jnp.asarray(layout.row_starts)
    item = jnp.arange(layout.capacity)
    row = jnp.searchsorted(starts, item, side="right") - 1
    row = jnp.where(item < starts[-1], row, layout.rows)
    planes = jnp.zeros((2, layout.rows + 1, layout.kv_blocks), bool)
    planes = planes.at[0, row, layout.kv_block].set(True)
    planes = planes.at[1, row, layout.kv_block].max(jnp.asarray(layout.is_partial))
    shape = (2, layout.batch, layout.heads, layout.q_blocks, layout.kv_blocks)
    return planes[:, :-1].reshape(shape)
