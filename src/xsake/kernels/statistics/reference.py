"""Dense definition of the statistics: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp

from xsake.kernels import reference_attention
from xsake.kernels.statistics.types import Statistics, StatisticsConfig, StatisticsInputs


def statistics(inputs: StatisticsInputs, config: StatisticsConfig, platform: str) -> Statistics:
    """Compute every statistic from the whole matrix of scores."""
    pairs = reference_attention
    mask = pairs.mask_pairs(config.mask, inputs) & pairs.segment_pairs(inputs)
    s, _ = pairs.scores(inputs.q, inputs.k, mask, config.scale, config.softcap)
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
