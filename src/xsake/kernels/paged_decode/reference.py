"""Dense definition of attention over pages: truth at small sizes, O(Tq Tk) memory."""

import jax
import jax.numpy as jnp
from jax import Array

from xsake.kernels.paged_decode.gather import gather_pages, visible_pairs
from xsake.kernels.paged_decode.types import PagedConfig, PagedInputs


def forward(inputs: PagedInputs, config: PagedConfig, platform: str) -> tuple[Array, Array]:
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq])`."""
    k, v = gather_pages(inputs, inputs.page)
    mask = visible_pairs(inputs, config, inputs.page, inputs.number)
    q = inputs.q.astype(inputs.dtype)
    q = q.reshape(*q.shape[:2], k.shape[1], -1, q.shape[-1])
    s = jnp.einsum("btkgd,bknd->bkgtn", q, k, precision="highest") * config.scale
    if config.softcap is not None:
        s = config.softcap * jnp.tanh(s / config.softcap)
    s = jnp.where(mask, s, -jnp.inf)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = jnp.where(mask, jnp.exp(s - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None]), 0)
    o = jnp.einsum("bkgtn,bknd->btkgd", p, v, precision="highest")
    by_query = lambda x: jnp.moveaxis(x, 3, 1).reshape(*inputs.q.shape[:3])
    return o.reshape(*inputs.q.shape[:3], -1).astype(inputs.q.dtype), by_query(lse)
