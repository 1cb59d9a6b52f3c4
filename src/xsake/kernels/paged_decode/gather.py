"""Keys and values of some slots, and the pairs that count."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from xsake.kernels.element_mask import rule_of_heads
from xsake.kernels.online_softmax import isolate_nonfinite
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs


def gather_pages(inputs: PagedInputs, page: Array) -> tuple[Array, Array]:
    """Keys and values of pages [B, Hl, n] as [B, Hk, n * page_size, D], in the dtype of sums."""
    kv_heads = inputs.k.shape[1]
    page = jnp.broadcast_to(jnp.maximum(page, 0), (page.shape[0], kv_heads, page.shape[2]))
    head = jnp.arange(kv_heads)[None, :, None]

    def load(pool: Array, scale: Any) -> Array:
        x = pool[page, head].astype(inputs.dtype)
        if scale is not None:
            x = x * scale[page, head].astype(inputs.dtype)[..., None, None]
        return x.reshape(*page.shape[:2], -1, pool.shape[-1])

    return isolate_nonfinite(load(inputs.k, inputs.k_scale), load(inputs.v, inputs.v_scale))


def visible_pairs(inputs: PagedInputs, config: PagedConfig, page: Array, number: Array) -> Array:
    """Whether a query of a head sees a key: bool [B, Hk, G, Tq, n * page_size]."""
    (batch, q_tokens, q_heads, _), kv_heads = inputs.q.shape, inputs.k.shape[1]
    group, size = q_heads // kv_heads, inputs.page_size
    offset = jnp.arange(size)[None, None, None]
    position = (number[..., None] * size + offset).reshape(*number.shape[:2], -1)
    exists = jnp.repeat(page >= 0, size, axis=2) & (position < inputs.lengths[:, None, None])
    kv_pos = jnp.maximum(position, 0)[:, :, None, None]
    q_pos = inputs.q_positions[:, None, None, :, None]
    heads = lambda: jnp.arange(q_heads).reshape(1, kv_heads, group, 1, 1)
    allows = rule_of_heads(config.mask, q_heads, heads)
    assert allows is not None
    seen = allows(jnp.maximum(q_pos, 0), kv_pos) & exists[:, :, None, None] & (q_pos >= 0)
    return jnp.broadcast_to(seen, (batch, kv_heads, group, q_tokens, position.shape[-1]))
