"""Dense JAX attention, whose autodiff is the reference of custom gradients."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def attend(
    q: Float[Array, "B Tq Hq D"],
    k: Float[Array, "B Tk Hk D"],
    v: Float[Array, "B Tk Hk Dv"],
    bias: Float[Array, "..."] | None = None,
    sinks: Float[Array, "..."] | None = None,
    *,
    allowed: Bool[Array, "B Hq Tq Tk"],
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[Float[Array, "B Tq Hq Dv"], Float[Array, "B Tq Hq"]]:
    """Compute dense masked attention; return `(out, lse)`.

    The bias is broadcastable to [B, Hq, Tq, Tk], sinks are [Hq] or [Hq, S].
    """
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * jnp.asarray(scale, dtype)
    if bias is not None:
        s = s + bias.astype(dtype)
    if softcap is not None:
        s = jnp.asarray(softcap, dtype) * jnp.tanh(s / jnp.asarray(softcap, dtype))
    s = jnp.where(allowed, s, -jnp.inf)
    if sinks is not None:
        extra = sinks.astype(dtype).reshape(1, sinks.shape[0], 1, -1)
        s = jnp.concatenate([s, jnp.broadcast_to(extra, s.shape[:3] + extra.shape[3:])], axis=-1)
    empty = jnp.all(s == -jnp.inf, axis=-1, keepdims=True)
    safe = jnp.where(empty, 0.0, s)
    lse = jax.nn.logsumexp(safe, axis=-1, keepdims=True)
    p = jnp.where(empty, 0.0, jnp.exp(safe - lse))[..., : k.shape[1]]
    out = jnp.einsum("bhqk,bkhd->bqhd", p, v)
    return out, jnp.moveaxis(jnp.where(empty, -jnp.inf, lse)[..., 0], 1, 2)
