"""Dense definition of the statistics: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp

from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs


def unsupported_reason(
    inputs: StatisticsInputs, config: StatisticsConfig, platform: str
) -> str | None:
    """Why this backend cannot serve the call: it serves every call."""
    return None


def statistics(inputs: StatisticsInputs, config: StatisticsConfig, platform: str) -> Statistics:
    """Compute every statistic from the whole matrix of scores."""
    mask = _mask_pairs(inputs, config)
    s = jnp.where(mask, _scores(inputs, config), -jnp.inf)
    m = s.max(-1, keepdims=True)
    below = jnp.where(s == -jnp.inf, -jnp.inf, s - m)
    p = jnp.exp(below)
    l = jnp.where(m == -jnp.inf, 1, p.sum(-1, keepdims=True))
    mean = jnp.where(p == 0, 0, p * below).sum(-1, keepdims=True) / l
    lse, entropy = (m + jnp.log(l))[..., 0], (jnp.log(l) - mean)[..., 0]
    missing = -s.shape[-1] % config.block_kv
    blocks = jnp.pad(s, ((0, 0),) * 3 + ((0, missing),), constant_values=-jnp.inf)
    blocks = blocks.reshape(*s.shape[:3], -1, config.block_kv)
    block_lse = jax.nn.logsumexp(blocks, axis=-1)
    return Statistics(*(jnp.swapaxes(x, 1, 2) for x in (lse, entropy, block_lse)))


def _scores(inputs: StatisticsInputs, config: StatisticsConfig):
    """Scores [B, Hq, Tq, Tk], masked pairs included."""
    group = inputs.q.shape[2] // inputs.k.shape[2]
    q, k = (x.astype(inputs.dtype) for x in (inputs.q, inputs.k))
    k = jnp.repeat(k, group, axis=2)
    s = jnp.einsum("bqhd,bkhd->bhqk", q * config.scale, k, precision="highest")
    if config.softcap is None:
        return s
    return config.softcap * jnp.tanh(s / config.softcap)


def _mask_pairs(inputs: StatisticsInputs, config: StatisticsConfig):
    """bool [B or 1, Hq or 1, Tq, Tk]: visible pairs."""
    mask, heads = config.mask, inputs.q.shape[2]
    q_pos, kv_pos = inputs.q_positions, inputs.kv_positions
    q_pos = jnp.arange(inputs.q.shape[1])[None] if q_pos is None else q_pos
    kv_pos = jnp.arange(inputs.k.shape[1])[None] if kv_pos is None else kv_pos
    q_pos, kv_pos = q_pos[:, None, :, None], kv_pos[:, None, None, :]
    head = None if mask.heads is None else jnp.arange(heads) * mask.heads // heads
    mask = mask.allows(q_pos, kv_pos, None if head is None else head[None, :, None, None])
    if inputs.q_segment_ids is not None and inputs.kv_segment_ids is not None:
        q_ids = inputs.q_segment_ids[:, None, :, None]
        kv_ids = inputs.kv_segment_ids[:, None, None, :]
        mask = mask & (q_ids == kv_ids) & (q_ids >= 0)
    return mask
