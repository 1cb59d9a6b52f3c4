"""The dense, boring definition of block-sparse attention: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp

from xsake.kernels.block_sparse import cost
from xsake.kernels.block_sparse.problem import (
    Cotangents,
    Gradients,
    Operands,
    Problem,
    cleaned,
    compute_dtype,
    quarantine,
)
from xsake.layout import BlockLayout
from xsake.masks import AbstractMask


def platforms() -> tuple[str, ...] | None:
    """Where this backend runs: None is everywhere."""
    return None


def unsupported(operands: Operands, problem: Problem, platform: str) -> str | None:
    """Why this backend cannot serve the call; None if it can."""
    if problem.tiles is not None:
        return "it is dense, so it has no tiles to size"
    return None


def passes(operands: Operands, problem: Problem, platform: str) -> tuple[cost.Pass, ...]:
    """What forward and backward will compute: everything."""
    return cost.dense(operands)


def forward(operands: Operands, problem: Problem):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    visible = visible_pairs(operands)
    logits, _ = _logits(operands, problem, visible)
    lse = _log_sum_exp(logits)
    weights = jnp.where(visible, jnp.exp(logits - _finite(lse)[..., None]), 0)
    _, v = _keys_and_values(operands)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")
    return out.astype(operands.q.dtype), jnp.swapaxes(lse, 1, 2)


def backward(operands: Operands, problem: Problem, out, lse, cotangents: Cotangents) -> Gradients:
    """Gradients for q, k, v and bias from the saved results."""
    dtype = compute_dtype(operands)
    visible = visible_pairs(operands)
    logits, slope = _logits(operands, problem, visible)
    d_out = cotangents.out.astype(dtype)
    # A query whose cotangent is not finite spoils what it sees, and only that.
    lse = jnp.where(jnp.isfinite(d_out).all(-1), lse, jnp.nan)
    d_out = cleaned(d_out)
    k, v = _keys_and_values(operands)
    delta = (d_out * out.astype(dtype)).sum(-1) - cotangents.lse.astype(dtype)
    delta, lse = jnp.swapaxes(delta, 1, 2), jnp.swapaxes(lse, 1, 2)

    weights = jnp.where(visible, jnp.exp(logits - _finite(lse)[..., None]), 0)
    d_weights = jnp.einsum("bqhd,bkhd->bhqk", d_out, v, precision="highest")
    d_logits = jnp.where(visible, weights * (d_weights - delta[..., None]) * slope, 0)
    q = cleaned(operands.q.astype(dtype)) * problem.scale
    d_q = jnp.einsum("bhqk,bkhd->bqhd", d_logits, cleaned(k), precision="highest") * problem.scale
    d_k = jnp.einsum("bhqk,bqhd->bkhd", d_logits, q, precision="highest")
    d_v = jnp.einsum("bhqk,bqhd->bkhd", weights, d_out, precision="highest")
    groups = (*operands.k.shape[:3], -1)
    d_k, d_v = (x.reshape(*groups[:2], groups[2], -1, x.shape[-1]).sum(3) for x in (d_k, d_v))
    d_bias = None
    if operands.bias is not None:
        axes = [axis for axis in (0, 1) if operands.bias.shape[axis] == 1]
        d_bias = d_logits.sum(axes, keepdims=True).astype(operands.bias.dtype)
    return Gradients(
        d_q.astype(operands.q.dtype),
        d_k.astype(operands.k.dtype),
        d_v.astype(operands.v.dtype),
        d_bias,
    )


def visible_pairs(operands: Operands):
    """bool [B, Hq, Tq, Tk]: the pairs that exist."""
    layout = operands.layout
    heads = operands.q.shape[2]
    listed, partial = _block_planes(layout)
    q_block = jnp.arange(layout.q_tokens) // layout.block_q
    kv_block = jnp.arange(layout.kv_tokens) // layout.block_kv
    listed, partial = (
        jnp.repeat(plane[:, :, q_block][..., kv_block], heads // layout.heads, axis=1)
        for plane in (listed, partial)
    )
    visible = listed
    if layout.mask is not None:
        visible = visible & (~partial | _allowed(operands, layout.mask))
    if operands.q_segment_ids is not None and operands.kv_segment_ids is not None:
        q_ids, kv_ids = operands.q_segment_ids[:, :, None], operands.kv_segment_ids[:, None, :]
        visible = visible & ((q_ids == kv_ids) & (q_ids >= 0))[:, None]
    return jnp.broadcast_to(visible, (operands.q.shape[0], *visible.shape[1:]))


def _allowed(operands: Operands, mask: AbstractMask):
    """What the mask says, [B or 1, Hq or 1, Tq, Tk]."""
    layout, heads = operands.layout, operands.q.shape[2]
    q_pos, kv_pos = jnp.arange(layout.q_tokens)[None], jnp.arange(layout.kv_tokens)[None]
    q_pos = q_pos if operands.q_positions is None else operands.q_positions
    kv_pos = kv_pos if operands.kv_positions is None else operands.kv_positions
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


def _logits(operands: Operands, problem: Problem, visible):
    """Logits [B, Hq, Tq, Tk] and their derivative by `scale * q.k + bias`.

    Hidden pairs are -inf before any power is taken: hidden after it, a large one would overflow
    and make derivatives of the gradients NaN.
    """
    q = operands.q.astype(compute_dtype(operands))
    k, _ = _keys_and_values(operands)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * problem.scale
    if operands.bias is not None:
        logits = logits + operands.bias.astype(logits.dtype)
    if problem.softcap is None:
        return jnp.where(visible, logits, -jnp.inf), jnp.ones((), logits.dtype)
    capped = jnp.tanh(jnp.where(visible, logits, 0) / problem.softcap)
    return jnp.where(visible, capped * problem.softcap, -jnp.inf), 1 - capped**2


def _keys_and_values(operands: Operands):
    """Quarantined keys and values with one copy per query head."""
    group = operands.q.shape[2] // operands.k.shape[2]
    k, v = quarantine(operands.k, operands.v)
    dtype = compute_dtype(operands)
    return tuple(jnp.repeat(x.astype(dtype), group, axis=2) for x in (k, v))


def _finite(lse):
    """+inf for rows that see nothing, so that their weights become 0 and not NaN."""
    return jnp.where(lse == -jnp.inf, jnp.inf, lse)


def _log_sum_exp(logits):
    """logsumexp over keys, -inf for rows without any."""
    return jax.nn.logsumexp(logits, axis=-1)
