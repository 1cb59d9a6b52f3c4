"""Dense definition of block-sparse attention: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp
from jax import Array

from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.types import (
    BlockSparseConfig,
    BlockSparseInputs,
    Gradients,
    compute_dtype,
)
from xsake.kernels.online_softmax import isolate_nonfinite, zero_nonfinite
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


def unsupported_reason(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if config.tiles is not None:
        return "it is dense, so it has no tiles to size"
    return None


def count_passes(
    inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str
) -> tuple[cost.KernelCost, ...]:
    """Cost of the forward and backward passes: all pairs."""
    return cost.dense(inputs)


def forward(inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    visible = pair_mask(inputs)
    s, _ = _scores(inputs, config, visible)
    lse = _log_sum_exp(s)
    p = jnp.where(visible, jnp.exp(s - _finite(lse)[..., None]), 0)
    _, v = _repeat_kv(inputs)
    o = jnp.einsum("bhqk,bkhd->bqhd", p, v, precision="highest")
    return o.astype(inputs.q.dtype), jnp.swapaxes(lse, 1, 2)


def backward(
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    platform: str,
    o: Array,
    lse: Array,
    do: Array,
    dlse: Array,
) -> Gradients:
    """Gradients for q, k, v and bias from the residuals."""
    dtype = compute_dtype(inputs)
    visible = pair_mask(inputs)
    s, slope = _scores(inputs, config, visible)
    do = do.astype(dtype)
    # A query whose cotangent is not finite reaches the keys that it sees, and no others.
    lse = jnp.where(jnp.isfinite(do).all(-1), lse, jnp.nan)
    do = zero_nonfinite(do)
    k, v = _repeat_kv(inputs)
    delta = (do * o.astype(dtype)).sum(-1) - dlse.astype(dtype)
    delta, lse = jnp.swapaxes(delta, 1, 2), jnp.swapaxes(lse, 1, 2)

    p = jnp.where(visible, jnp.exp(s - _finite(lse)[..., None]), 0)
    dp = jnp.einsum("bqhd,bkhd->bhqk", do, v, precision="highest")
    ds = jnp.where(visible, p * (dp - delta[..., None]) * slope, 0)
    q = zero_nonfinite(inputs.q.astype(dtype)) * config.scale
    dq = jnp.einsum("bhqk,bkhd->bqhd", ds, zero_nonfinite(k), precision="highest") * config.scale
    dk = jnp.einsum("bhqk,bqhd->bkhd", ds, q, precision="highest")
    dv = jnp.einsum("bhqk,bqhd->bkhd", p, do, precision="highest")
    groups = (*inputs.k.shape[:3], -1)
    dk, dv = (x.reshape(*groups[:2], groups[2], -1, x.shape[-1]).sum(3) for x in (dk, dv))
    dbias = None
    if inputs.bias is not None:
        axes = [axis for axis in (0, 1) if inputs.bias.shape[axis] == 1]
        dbias = ds.sum(axes, keepdims=True).astype(inputs.bias.dtype)
    return Gradients(
        dq.astype(inputs.q.dtype),
        dk.astype(inputs.k.dtype),
        dv.astype(inputs.v.dtype),
        dbias,
    )


def pair_mask(inputs: BlockSparseInputs):
    """Visible pairs, bool [B, Hq, Tq, Tk]."""
    layout = inputs.layout
    heads = inputs.q.shape[2]
    listed, partial = _block_planes(layout)
    q_block = jnp.arange(layout.q_tokens) // layout.block_q
    kv_block = jnp.arange(layout.kv_tokens) // layout.block_kv
    listed, partial = (
        jnp.repeat(plane[:, :, q_block][..., kv_block], heads // layout.heads, axis=1)
        for plane in (listed, partial)
    )
    visible = listed
    if layout.mask is not None:
        visible = visible & (~partial | _mask_pairs(inputs, layout.mask))
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        q_ids, kv_ids = inputs.q_segment_ids[:, :, None], inputs.kv_segment_ids[:, None, :]
        visible = visible & ((q_ids == kv_ids) & (q_ids >= 0))[:, None]
    return jnp.broadcast_to(visible, (inputs.q.shape[0], *visible.shape[1:]))


def _mask_pairs(inputs: BlockSparseInputs, mask: AbstractMask):
    """Pairs that the mask allows, [B or 1, Hq or 1, Tq, Tk]."""
    layout, heads = inputs.layout, inputs.q.shape[2]
    q_pos, kv_pos = jnp.arange(layout.q_tokens)[None], jnp.arange(layout.kv_tokens)[None]
    q_pos = q_pos if inputs.q_positions is None else inputs.q_positions
    kv_pos = kv_pos if inputs.kv_positions is None else inputs.kv_positions
    q_pos, kv_pos = q_pos[:, None, :, None], kv_pos[:, None, None, :]
    if mask.heads is None:
        return mask.allows(q_pos, kv_pos)
    head = jnp.arange(heads) * mask.heads // heads
    return mask.allows(q_pos, kv_pos, head[None, :, None, None])


def _block_planes(layout: BlockLayout):
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


def _scores(inputs: BlockSparseInputs, config: BlockSparseConfig, visible):
    """Logits [B, Hq, Tq, Tk] and their derivative by `scale * q.k + bias`.

    Hidden pairs are -inf before any power is taken: hidden after it, a large one would overflow
    and make derivatives of the gradients NaN.
    """
    q = inputs.q.astype(compute_dtype(inputs))
    k, _ = _repeat_kv(inputs)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * config.scale
    if inputs.bias is not None:
        logits = logits + inputs.bias.astype(logits.dtype)
    if config.softcap is None:
        return jnp.where(visible, logits, -jnp.inf), jnp.ones((), logits.dtype)
    capped = jnp.tanh(jnp.where(visible, logits, 0) / config.softcap)
    return jnp.where(visible, capped * config.softcap, -jnp.inf), 1 - capped**2


def _repeat_kv(inputs: BlockSparseInputs):
    """Keys and values, non-finite ones isolated, repeated for each query head."""
    group = inputs.q.shape[2] // inputs.k.shape[2]
    k, v = isolate_nonfinite(inputs.k, inputs.v)
    dtype = compute_dtype(inputs)
    return tuple(jnp.repeat(x.astype(dtype), group, axis=2) for x in (k, v))


def _finite(lse):
    """lse, +inf where it is -inf so that p is 0 and not NaN."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def _log_sum_exp(logits):
    """logsumexp over keys, -inf for rows without any."""
    return jax.nn.logsumexp(logits, axis=-1)
