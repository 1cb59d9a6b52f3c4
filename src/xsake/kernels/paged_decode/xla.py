"""Attention over pages in a plain XLA loop: some pages a step, the used slots only."""

import jax.numpy as jnp
from jax import Array, lax

from xsake.kernels import online_softmax
from xsake.kernels.online_softmax import SoftmaxState
from xsake.kernels.paged_decode.gather import gather_pages, visible_pairs
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs

STEP_KEYS = 256


def forward(inputs: PagedInputs, config: PagedConfig, platform: str) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    (batch, q_tokens, q_heads, dim), kv_heads = inputs.q.shape, inputs.k.shape[1]
    rows, queries = batch * kv_heads, q_heads // kv_heads * q_tokens
    factor = online_softmax.query_factor(config.scale, config.softcap)
    q = inputs.q.astype(inputs.dtype) * jnp.asarray(factor, inputs.dtype)
    q = q.reshape(batch, q_tokens, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(rows, queries, dim)
    slots = max(1, STEP_KEYS // inputs.page_size)
    padding = ((0, 0), (0, 0), (0, -inputs.page.shape[2] % slots))
    pages = jnp.pad(inputs.page, padding, constant_values=-1)
    numbers = jnp.pad(inputs.number, padding)
    last = jnp.where(pages >= 0, jnp.arange(pages.shape[2])[None, None], -1).max(initial=-1)

    def body(step: Array, state: SoftmaxState) -> SoftmaxState:
        page, number = (
            lax.dynamic_slice_in_dim(x, step * slots, slots, 2) for x in (pages, numbers)
        )
        k, v = (x.reshape(rows, -1, x.shape[-1]) for x in gather_pages(inputs, page))
        s = online_softmax.dot_products(q, k)
        s = online_softmax.to_scores(s, None, config.softcap)
        mask = visible_pairs(inputs, config, page, number)
        s = jnp.where(mask.reshape(s.shape), s, -jnp.inf)
        return online_softmax.update(state, s, v)

    state = online_softmax.init(rows, queries, inputs.v.shape[-1], inputs.dtype)
    state = lax.fori_loop(0, last // slots + 1, body, state)
    o, lse = online_softmax.finalize(state)
    by_query = lambda x: jnp.moveaxis(
        x.reshape(batch, kv_heads, -1, q_tokens, *x.shape[2:]), 3, 1
    ).reshape(*inputs.q.shape[:3], *x.shape[2:])
    return by_query(o).astype(inputs.q.dtype), by_query(lse)
