"""The parts of a decoder layer: norm, attention projections and MLP; they know no positions."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from xsake.model.config import DecoderConfig

Look = Callable[..., tuple[Array, Any]]
"""From queries, keys and values of a layer to (what was seen, anything to hand on)."""

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


def parameter(
    rngs: nnx.Rngs, names: tuple[str, ...], shape: tuple[int, ...], dtype, *, fan_in: int
) -> nnx.Param:
    """A normal draw with variance 1 / `fan_in`; `names` say what each axis is, for sharding."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) / math.sqrt(fan_in)
    return named(value.astype(dtype), names)


def named(value: Array, names: tuple[str, ...]) -> nnx.Param:
    """A parameter whose axes have logical names; which device axis they take is decided later."""
    assert value.ndim == len(names), (value.shape, names)
    return nnx.Param(value, out_sharding=names, eager_sharding=False)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, in float32."""

    def __init__(self, config: DecoderConfig, size: int, axis: str, dtype):
        self.kind, self.epsilon = config.norm, config.norm_epsilon
        self.offset = config.norm_offset
        self.weight = named(jnp.full((size,), 1 - config.norm_offset, dtype), (axis,))
        self.bias = named(jnp.zeros((size,), dtype), (axis,)) if self.kind == "layer" else None

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
    """Projections to and from heads; what happens between is the `look` it is given."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        width, dim = config.width, config.head_dim
        heads = {"query": config.q_heads, "key": config.kv_heads, "value": config.kv_heads}
        axes = {"query": "q_heads", "key": "kv_heads", "value": "kv_heads"}
        draw = lambda axis, count: parameter(
            rngs, ("embed", axis, "head_dim"), (width, count, dim), dtype, fan_in=width
        )
        bias = lambda axis, count: (
            named(jnp.zeros((count, dim), dtype), (axis, "head_dim"))
            if config.has_qkv_bias
            else None
        )
        self.query, self.key, self.value = (draw(axes[x], heads[x]) for x in heads)
        self.query_bias, self.key_bias, self.value_bias = (bias(axes[x], heads[x]) for x in heads)
        out_shape = (config.q_heads, dim, width)
        out_names = ("q_heads", "head_dim", "embed")
        self.out = parameter(rngs, out_names, out_shape, dtype, fan_in=config.q_heads * dim)
        self.out_bias = (
            named(jnp.zeros((width,), dtype), ("embed",)) if config.has_out_bias else None
        )
        norm = lambda: Norm(config, dim, "head_dim", dtype) if config.has_qk_norm else None
        self.query_norm, self.key_norm = norm(), norm()

    def __call__(self, x: Float[Array, "B T width"], look: Look):
        q = _heads(x, self.query, self.query_bias)
        k = _heads(x, self.key, self.key_bias)
        v = _heads(x, self.value, self.value_bias)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        seen, kept = look(q, k, v)
        out = jnp.einsum("bthd,hde->bte", seen, self.out[...].astype(x.dtype))
        return _plus(out, self.out_bias), kept


class Mlp(nnx.Module):
    """Two layers with an activation between, which a third may gate."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        width, inner = config.width, config.mlp_width
        wide = lambda: parameter(rngs, ("embed", "mlp"), (width, inner), dtype, fan_in=width)
        bias = lambda size, axis: (
            named(jnp.zeros((size,), dtype), (axis,)) if config.has_mlp_bias else None
        )
        self.activation = config.activation
        self.gate = wide() if config.is_gated else None
        self.gate_bias = bias(inner, "mlp") if config.is_gated else None
        self.up, self.up_bias = wide(), bias(inner, "mlp")
        self.down = parameter(rngs, ("mlp", "embed"), (inner, width), dtype, fan_in=inner)
        self.down_bias = bias(width, "embed")

    def __call__(self, x: Float[Array, "B T width"]) -> Float[Array, "B T width"]:
        activation = _ACTIVATIONS[self.activation]
        up = _plus(x @ self.up[...].astype(x.dtype), self.up_bias)
        if self.gate is None:
            inner = activation(up)
        else:
            gate = _plus(x @ self.gate[...].astype(x.dtype), self.gate_bias)
            inner = activation(gate) * up
        return _plus(inner @ self.down[...].astype(x.dtype), self.down_bias)


class Layer(nnx.Module):
    """Attention and MLP, each on a normalised copy of the stream and added to it.

    `make_attention(config, rngs, dtype)` gives the projections: `Attention`, or one like it.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype, make_attention=Attention):
        norm = lambda: Norm(config, config.width, "embed", dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm = norm() if config.has_post_norms else None
        self.mlp_post_norm = norm() if config.has_post_norms else None
        self.attention = make_attention(config, rngs, dtype)
        self.mlp = Mlp(config, rngs, dtype)

    def __call__(self, x: Float[Array, "B T width"], look: Look):
        """(the stream after this layer, what `look` handed on)."""
        found, kept = self.attention(self.attention_norm(x), look)
        x = x + (found if self.attention_post_norm is None else self.attention_post_norm(found))
        found = self.mlp(self.mlp_norm(x))
        x = x + (found if self.mlp_post_norm is None else self.mlp_post_norm(found))
        return x, kept


def _heads(x, weight: nnx.Param, bias: nnx.Param | None):
    return _plus(jnp.einsum("bte,ehd->bthd", x, weight[...].astype(x.dtype)), bias)


def _plus(x, bias: nnx.Param | None):
    if bias is None:
        return x
    return x + bias[...].astype(x.dtype)[(None,) * (x.ndim - bias[...].ndim)]
