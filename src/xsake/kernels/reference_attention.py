"""Attention over any set of pairs, all pairs computed: what the references of operations share."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from xsake.kernels.online_softmax import isolate_nonfinite, zero_nonfinite
from xsake.kernels.validation import sum_dtype


def forward(
    q: Float[Array, "B Tq Hq D"],
    k: Float[Array, "B Tk Hk D"],
    v: Float[Array, "B Tk Hk Dv"],
    mask: Bool[Array, "B Hk Tq Tk"],
    scale: float,
):
    """`(o [B, Tq, Hq, Dv], lse [B, Tq, Hq], weights [B, Hq, Tq, Tk])`."""
    _, _, v, mask, s = _pairs(q, k, v, mask, scale)
    m = s.max(-1, keepdims=True)
    p = jnp.where(mask, jnp.exp(s - jnp.where(m == -jnp.inf, 0, m)), 0)
    l = p.sum(-1, keepdims=True)
    safe = jnp.where(l == 0, 1, l)
    o = jnp.einsum("bhqk,bkhd->bqhd", p / safe, v, precision="highest")
    lse = jnp.where(l == 0, -jnp.inf, m + jnp.log(safe))[..., 0]
    return o.astype(q.dtype), jnp.swapaxes(lse, 1, 2), p / safe


def backward(
    arrays: tuple,
    mask: Bool[Array, "B Hk Tq Tk"],
    scale: float,
    residuals: tuple,
    cotangents: tuple,
):
    """Gradients of the arrays (q, k, v) from the residuals (o, lse), by the formulas."""
    group = arrays[0].shape[2] // arrays[1].shape[2]
    q, k, v = arrays
    q, k, v, mask, s = _pairs(q, k, v, mask, scale)
    o, lse = residuals[0].astype(q.dtype), jnp.swapaxes(residuals[1], 1, 2)[..., None]
    p = jnp.where(mask, jnp.exp(s - jnp.where(lse == -jnp.inf, 0, lse)), 0)
    do = cotangents[0].astype(q.dtype)
    delta = jnp.swapaxes((do * o).sum(-1) - cotangents[1], 1, 2)[..., None]
    dp = jnp.einsum("bqhd,bkhd->bhqk", do, v, precision="highest")
    ds = jnp.where(mask, p * (dp - delta), 0)
    dq = jnp.einsum("bhqk,bkhd->bqhd", ds, zero_nonfinite(k), precision="highest") * scale
    dk = jnp.einsum("bhqk,bqhd->bkhd", ds, zero_nonfinite(q), precision="highest") * scale
    dv = jnp.einsum("bhqk,bqhd->bkhd", p, zero_nonfinite(do), precision="highest")
    own = lambda x, like: x.reshape(*like.shape[:3], group, -1).sum(3).astype(like.dtype)
    return dq.astype(arrays[0].dtype), own(dk, arrays[1]), own(dv, arrays[2])


def _pairs(q, k, v, mask, scale: float):
    """Everything by query head and in the dtype of sums; values that are not finite are zero."""
    group, dtype = q.shape[2] // k.shape[2], sum_dtype(q.dtype)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    k, v = (jnp.repeat(x, group, axis=2) for x in isolate_nonfinite(k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q * scale, k, precision="highest")
    mask = jnp.repeat(mask, group, axis=1)
    # Hidden before any power is taken, so that none overflows in derivatives of gradients.
    return q, k, v, mask, jnp.where(mask, s, -jnp.inf)
