"""Parts of a decoder layer: norm, attention projections and MLP."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from xsake.model.config import DecoderConfig

InnerAttention = Callable[..., tuple[Array, Any]]
"""Maps q, k and v of a layer to (attention output, auxiliary output)."""

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def init_param(
    rngs: nnx.Rngs, names: tuple[str, ...], shape: tuple[int, ...], dtype, *, fan_in: int
) -> nnx.Param:
    """Return a normal parameter with variance 1 / `fan_in`; `names` are its logical axes."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return named_param(value.astype(dtype), names)


def named_param(value: Array, names: tuple[str, ...]) -> nnx.Param:
    """Return a parameter with logical axis names; sharding rules map them to mesh axes later."""
    assert value.ndim == len(names), (value.shape, names)
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, in float32."""

    def __init__(self, config: DecoderConfig, size: int, axis: str, dtype):
        self.kind, self.epsilon = config.norm, config.norm_epsilon
        self.offset = config.norm_offset
        self.weight = named_param(jnp.full((size,), 1 - config.norm_offset, dtype), (axis,))
        self.bias = (
            named_param(jnp.zeros((size,), dtype), (axis,)) if self.kind == "layer" else None
        )

    def __call__(self, x: Float[Array, "*rest size"]) -> Float[Array, "*rest size"]:
        wide = x.astype(jnp.float32)
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.epsilon)
        one_axis = (1,) * (x.ndim - 1) + (-1,)
        wide = wide * (self.weight[...].astype(jnp.float32) + self.offset).reshape(one_axis)
        if self.bias is not None:
            wide = wide + self.bias[...].astype(jnp.float32).reshape(one_axis)
        return wide.astype(x.dtype)


class Attention(nnx.Module):
    """Projections to and from heads around an attention function."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        width, dim = config.width, config.head_dim
        heads = {"query": config.q_heads, "key": config.kv_heads, "value": config.kv_heads}
        axes = {"query": "q_heads", "key": "kv_heads", "value": "kv_heads"}
        draw = lambda axis, count: init_param(
            rngs, ("embed", axis, "head_dim"), (width, count, dim), dtype, fan_in=width
        )
        bias = lambda axis, count: (
            named_param(jnp.zeros((count, dim), dtype), (axis, "head_dim"))
            if config.has_qkv_bias
            else None
        )
        self.query, self.key, self.value = (draw(axes[x], heads[x]) for x in heads)
        self.query_bias, self.key_bias, self.value_bias = (bias(axes[x], heads[x]) for x in heads)
        out_shape = (config.q_heads, dim, width)
        out_names = ("q_heads", "head_dim", "embed")
        self.out = init_param(rngs, out_names, out_shape, dtype, fan_in=config.q_heads * dim)
        self.out_bias = (
            named_param(jnp.zeros((width,), dtype), ("embed",)) if config.has_out_bias else None
        )
        norm = lambda: Norm(config, dim, "head_dim", dtype) if config.has_qk_norm else None
        self.query_norm, self.key_norm = norm(), norm()

    def __call__(self, x: Float[Array, "B T width"], attention_fn: InnerAttention):
        q = _project_heads(x, self.query, self.query_bias)
        k = _project_heads(x, self.key, self.key_bias)
        v = _project_heads(x, self.value, self.value_bias)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        attended, aux = attention_fn(q, k, v)
        out = jnp.einsum("bthd,hde->bte", attended, self.out[...].astype(x.dtype))
        return _add_bias(out, self.out_bias), aux


class Mlp(nnx.Module):
    """MLP with an optional gate."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        width, inner = config.width, config.mlp_width
        wide = lambda: init_param(rngs, ("embed", "mlp"), (width, inner), dtype, fan_in=width)
        bias = lambda size, axis: (
            named_param(jnp.zeros((size,), dtype), (axis,)) if config.has_mlp_bias else None
        )
        self.activation = config.activation
        self.gate = wide() if config.is_gated else None
        self.gate_bias = bias(inner, "mlp") if config.is_gated else None
        self.up, self.up_bias = wide(), bias(inner, "mlp")
        self.down = init_param(rngs, ("mlp", "embed"), (inner, width), dtype, fan_in=inner)
        self.down_bias = bias(width, "embed")

    def __call__(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        activation = _ACTIVATIONS[self.activation]
        up = _add_bias(x @ self.up[...].astype(x.dtype), self.up_bias)
        if self.gate is None:
            inner = activation(up)
        else:
            gate = _add_bias(x @ self.gate[...].astype(x.dtype), self.gate_bias)
            inner = activation(gate) * up
        return _add_bias(inner @ self.down[...].astype(x.dtype), self.down_bias)


class Layer(nnx.Module):
    """Pre-norm transformer layer.

    `make_attention(config, rngs, dtype)` creates the projections, such as `Attention`.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype, make_attention=Attention):
        norm = lambda: Norm(config, config.width, "embed", dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm = norm() if config.has_post_norms else None
        self.mlp_post_norm = norm() if config.has_post_norms else None
        self.attention = make_attention(config, rngs, dtype)
        self.mlp = Mlp(config, rngs, dtype)

    def __call__(self, x: Float[Array, "B T width"], attention_fn: InnerAttention):
        """Return (residual stream, auxiliary output of `attention_fn`)."""
        out, aux = self.attention(self.attention_norm(x), attention_fn)
        x = x + (out if self.attention_post_norm is None else self.attention_post_norm(out))
        out = self.mlp(self.mlp_norm(x))
        x = x + (out if self.mlp_post_norm is None else self.mlp_post_norm(out))
        return x, aux


def _project_heads(x, weight: nnx.Param, bias: nnx.Param | None):
    return _add_bias(jnp.einsum("bte,ehd->bthd", x, weight[...].astype(x.dtype)), bias)


def _add_bias(x, bias: nnx.Param | None):
    if bias is None:
        return x
    return x + bias[...].astype(x.dtype)[(None,) * (x.ndim - bias[...].ndim)]
