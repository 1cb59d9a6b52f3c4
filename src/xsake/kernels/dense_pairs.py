"""Attention over any set of pairs, all pairs computed: what the references of operations share."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from xsake.kernels.arguments import sum_dtype
from xsake.kernels.block_sparse.problem import cleaned, quarantine


def forward(
    q: Float[Array, "B Tq Hq D"],
    k: Float[Array, "B Tk Hk D"],
    v: Float[Array, "B Tk Hk Dv"],
    seen: Bool[Array, "B Hk Tq Tk"],
    scale: float,
):
    """`(out [B, Tq, Hq, Dv], lse [B, Tq, Hq], weights [B, Hq, Tq, Tk])`."""
    _, _, v, seen, logits = _pairs(q, k, v, seen, scale)
    peak = logits.max(-1, keepdims=True)
    weight = jnp.where(seen, jnp.exp(logits - jnp.where(peak == -jnp.inf, 0, peak)), 0)
    mass = weight.sum(-1, keepdims=True)
    safe = jnp.where(mass == 0, 1, mass)
    out = jnp.einsum("bhqk,bkhd->bqhd", weight / safe, v, precision="highest")
    lse = jnp.where(mass == 0, -jnp.inf, peak + jnp.log(safe))[..., 0]
    return out.astype(q.dtype), jnp.swapaxes(lse, 1, 2), weight / safe


def backward(
    arrays: tuple, seen: Bool[Array, "B Hk Tq Tk"], scale: float, saved: tuple, cotangents: tuple
):
    """Gradients of the arrays (q, k, v) from the saved (out, lse), by the formulas."""
    group = arrays[0].shape[2] // arrays[1].shape[2]
    q, k, v = arrays
    q, k, v, seen, logits = _pairs(q, k, v, seen, scale)
    out, lse = saved[0].astype(q.dtype), jnp.swapaxes(saved[1], 1, 2)[..., None]
    weight = jnp.where(seen, jnp.exp(logits - jnp.where(lse == -jnp.inf, 0, lse)), 0)
    d_out = cotangents[0].astype(q.dtype)
    delta = jnp.swapaxes((d_out * out).sum(-1) - cotangents[1], 1, 2)[..., None]
    products = jnp.einsum("bqhd,bkhd->bhqk", d_out, v, precision="highest")
    slope = jnp.where(seen, weight * (products - delta), 0)
    d_q = jnp.einsum("bhqk,bkhd->bqhd", slope, cleaned(k), precision="highest") * scale
    d_k = jnp.einsum("bhqk,bqhd->bkhd", slope, cleaned(q), precision="highest") * scale
    d_v = jnp.einsum("bhqk,bqhd->bkhd", weight, cleaned(d_out), precision="highest")
    own = lambda x, like: x.reshape(*like.shape[:3], group, -1).sum(3).astype(like.dtype)
    return d_q.astype(arrays[0].dtype), own(d_k, arrays[1]), own(d_v, arrays[2])


def _pairs(q, k, v, seen, scale: float):
    """Everything by query head and in the dtype of sums; values that are not finite are zero."""
    group, dtype = q.shape[2] // k.shape[2], sum_dtype(q.dtype)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=2) for x in quarantine(k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q * scale, k, precision="highest")
    seen = jnp.repeat(seen, group, axis=1)
    # Hidden before any power is taken, so that none overflows in derivatives of gradients.
    return q, k, v, seen, jnp.where(seen, logits, -jnp.inf)
