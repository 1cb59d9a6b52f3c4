"""Dense attention over any set of pairs: the formulas that the references of operations share."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from xsake.kernels.block_sparse.types import Gradients
from xsake.kernels.online_softmax import isolate_nonfinite, zero_nonfinite
from xsake.kernels.validation import sum_dtype
from xsake.masks import AbstractMask


def mask_pairs(mask: AbstractMask, inputs: Any) -> Bool[Array, "#B #Hq Tq Tk"]:
    """Pairs that a mask allows in a call with positions."""
    q_tokens, heads, kv_tokens = *inputs.q.shape[1:3], inputs.k.shape[1]
    q_pos, kv_pos = inputs.q_positions, inputs.kv_positions
    q_pos = jnp.arange(q_tokens)[None] if q_pos is None else q_pos
    kv_pos = jnp.arange(kv_tokens)[None] if kv_pos is None else kv_pos
    q_pos, kv_pos = q_pos[:, None, :, None], kv_pos[:, None, None, :]
    head = None if mask.heads is None else jnp.arange(heads) * mask.heads // heads
    head = None if head is None else head[None, :, None, None]
    return jnp.asarray(mask.allows(q_pos, kv_pos, head))


def segment_pairs(inputs: Any) -> Bool[Array, "#B 1 #Tq #Tk"]:
    """Pairs of tokens of one segment in a call with segment ids."""
    if inputs.q_segment_ids is None:
        return jnp.ones((1, 1, 1, 1), bool)
    q_ids = inputs.q_segment_ids[:, None, :, None]
    kv_ids = inputs.kv_segment_ids[:, None, None, :]
    return (q_ids == kv_ids) & (q_ids >= 0)


def forward(
    q: Float[Array, "B Tq Hq D"],
    k: Float[Array, "B Tk Hk D"],
    v: Float[Array, "B Tk Hk Dv"],
    mask: Bool[Array, "B H Tq Tk"],
    scale: float,
    softcap: float | None = None,
    bias: Float[Array, "Bb Hb Tq Tk"] | None = None,
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"], Float[Array, "B Hq Tq Tk"]]:
    """`(o, lse, p)`; the mask is per query head or per kv head."""
    mask = _by_query_head(mask, q, 1)
    k, v = isolate_nonfinite(k, v)  # before the scores: a bad value makes its key NaN
    s, _ = scores(q, k, mask, scale, softcap, bias)
    lse = jax.nn.logsumexp(s, axis=-1)
    p = _probabilities(s, lse, mask)
    _, v = _repeat_kv(q, k, v)
    o = jnp.einsum("bhqk,bkhd->bqhd", p, v, precision="highest")
    return o.astype(q.dtype), jnp.swapaxes(lse, 1, 2), p


def backward(
    q: Float[Array, "B Tq Hq D"],
    k: Float[Array, "B Tk Hk D"],
    v: Float[Array, "B Tk Hk Dv"],
    mask: Bool[Array, "B H Tq Tk"],
    residuals: tuple[Array, ...],
    scale: float,
    softcap: float | None = None,
    bias: Float[Array, "Bb Hb Tq Tk"] | None = None,
) -> Gradients:
    """Gradients from the residuals (o, lse, do, dlse), by the formulas."""
    dtype, mask = sum_dtype(q.dtype), _by_query_head(mask, q, 1)
    k, v = isolate_nonfinite(k, v)
    s, slope = scores(q, k, mask, scale, softcap, bias)
    o, lse, do, dlse = (x.astype(dtype) for x in residuals)
    delta, lse = (jnp.swapaxes(x, 1, 2) for x in ((do * o).sum(-1) - dlse, lse))
    k_rep, v_rep = _repeat_kv(q, k, v)
    p = _probabilities(s, lse, mask)
    dp = jnp.einsum("bqhd,bkhd->bhqk", do, v_rep, precision="highest")
    ds = jnp.where(mask, p * (dp - delta[..., None]) * slope, 0)
    dq = jnp.einsum("bhqk,bkhd->bqhd", ds, zero_nonfinite(k_rep), precision="highest") * scale
    scaled = zero_nonfinite(q.astype(dtype)) * scale
    dk = jnp.einsum("bhqk,bqhd->bkhd", ds, scaled, precision="highest")
    dv = jnp.einsum("bhqk,bqhd->bkhd", p, zero_nonfinite(do), precision="highest")
    of_group = lambda x, like: x.reshape(*like.shape[:3], -1, x.shape[-1]).sum(3).astype(like.dtype)
    dbias = None
    if bias is not None:
        axes = [axis for axis in (0, 1) if bias.shape[axis] == 1]
        dbias = ds.sum(axes, keepdims=True).astype(bias.dtype)
    return Gradients(dq.astype(q.dtype), of_group(dk, k), of_group(dv, v), dbias)


def scores(
    q: Float[Array, "B Tq Hq D"],
    k: Float[Array, "B Tk Hk D"],
    mask: Bool[Array, "#B #Hq Tq Tk"],
    scale: float,
    softcap: float | None = None,
    bias: Float[Array, "Bb Hb Tq Tk"] | None = None,
) -> tuple[Float[Array, "B Hq Tq Tk"], Float[Array, "..."]]:
    """Scores and their derivative by `scale * q.k + bias`.

    Masked pairs are -inf before any power is taken: masked after it, a large one would overflow
    and make derivatives of the gradients NaN.
    """
    k, _ = _repeat_kv(q, k, k)
    s = jnp.einsum("bqhd,bkhd->bhqk", q.astype(k.dtype), k, precision="highest") * scale
    if bias is not None:
        s = s + bias.astype(s.dtype)
    if softcap is None:
        return jnp.where(mask, s, -jnp.inf), jnp.ones((), s.dtype)
    capped = jnp.tanh(jnp.where(mask, s, 0) / softcap)
    return jnp.where(mask, capped * softcap, -jnp.inf), 1 - capped**2


def _probabilities(s: Array, lse: Array, mask: Array) -> Array:
    """`exp(s - lse)`; 0 for queries without a visible key."""
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
    return jnp.where(mask, jnp.exp(s - lse[..., None]), 0)


def _repeat_kv(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
    """Keys and values in the dtype of sums, non-finite values isolated, for each query head."""
    k, v = (x.astype(sum_dtype(q.dtype)) for x in isolate_nonfinite(k, v))
    return _by_query_head(k, q, 2), _by_query_head(v, q, 2)


def _by_query_head(x: Array, q: Array, axis: int) -> Array:
    """Repeat an axis of kv heads, or of query heads, for every query head."""
    return jnp.repeat(x, q.shape[2] // x.shape[axis], axis=axis)
