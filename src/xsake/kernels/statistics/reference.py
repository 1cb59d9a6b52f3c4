"""The dense, boring definition of the statistics: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp

from xsake.kernels.statistics.problem import Operands, Problem, Statistics


def statistics(operands: Operands, problem: Problem) -> Statistics:
    """Every statistic from the whole matrix of logits."""
    visible = _visible_pairs(operands, problem)
    logits = jnp.where(visible, _logits(operands, problem), -jnp.inf)
    peak = logits.max(-1, keepdims=True)
    below = jnp.where(logits == -jnp.inf, -jnp.inf, logits - peak)
    weights = jnp.exp(below)
    total = jnp.where(peak == -jnp.inf, 1, weights.sum(-1, keepdims=True))
    mean = jnp.where(weights == 0, 0, weights * below).sum(-1, keepdims=True) / total
    lse, entropy = (peak + jnp.log(total))[..., 0], (jnp.log(total) - mean)[..., 0]
    missing = -logits.shape[-1] % problem.block_kv
    blocks = jnp.pad(logits, ((0, 0),) * 3 + ((0, missing),), constant_values=-jnp.inf)
    blocks = blocks.reshape(*logits.shape[:3], -1, problem.block_kv)
    block_lse = jax.nn.logsumexp(blocks, axis=-1)
    return Statistics(*(jnp.swapaxes(x, 1, 2) for x in (lse, entropy, block_lse)))


def _logits(operands: Operands, problem: Problem):
    """[B, Hq, Tq, Tk], of visible pairs and others."""
    group = operands.q.shape[2] // operands.k.shape[2]
    q, k = (x.astype(operands.dtype) for x in (operands.q, operands.k))
    k = jnp.repeat(k, group, axis=2)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q * problem.scale, k, precision="highest")
    if problem.softcap is None:
        return logits
    return problem.softcap * jnp.tanh(logits / problem.softcap)


def _visible_pairs(operands: Operands, problem: Problem):
    """bool [B or 1, Hq or 1, Tq, Tk]: the pairs that exist."""
    mask, heads = problem.mask, operands.q.shape[2]
    q_pos, kv_pos = operands.q_positions, operands.kv_positions
    q_pos = jnp.arange(operands.q.shape[1])[None] if q_pos is None else q_pos
    kv_pos = jnp.arange(operands.k.shape[1])[None] if kv_pos is None else kv_pos
    q_pos, kv_pos = q_pos[:, None, :, None], kv_pos[:, None, None, :]
    head = None if mask.heads is None else jnp.arange(heads) * mask.heads // heads
    visible = mask.allows(q_pos, kv_pos, None if head is None else head[None, :, None, None])
    if operands.q_segment_ids is not None and operands.kv_segment_ids is not None:
        q_ids = operands.q_segment_ids[:, None, :, None]
        kv_ids = operands.kv_segment_ids[:, None, None, :]
        visible = visible & (q_ids == kv_ids) & (q_ids >= 0)
    return visible
