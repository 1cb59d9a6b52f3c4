"""Parts of a decoder layer: norm, rotary positions, attention projections and MLP."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from xsake.model.config import DecoderConfig, LinearScaling, Llama3Scaling, Rope, YarnScaling

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


def zero_param(
    names: tuple[str, ...], shape: tuple[int, ...], dtype, is_used: bool = True
) -> nnx.Param | None:
    """Return a parameter of zeros, or None for a model without it."""
    return named_param(jnp.zeros(shape, dtype), names) if is_used else None


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last axis, in float32."""

    def __init__(self, config: DecoderConfig, size: int, axis: str, dtype):
        self.kind, self.epsilon = config.norm, config.norm_epsilon
        self.offset = config.norm_offset
        self.weight = named_param(jnp.full((size,), 1 - config.norm_offset, dtype), (axis,))
        self.bias = zero_param((axis,), (size,), dtype, self.kind == "layer")

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


def frequencies(rope: Rope, head_dim: int) -> tuple[np.ndarray, float]:
    """Return radians per position of each pair of dimensions [D/2], and the attention factor."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.base**-exponents
    match rope.scaling:
        case None:
            return plain, 1.0
        case LinearScaling(factor=factor):
            return plain / factor, 1.0
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling), 1.0
        case YarnScaling() as scaling:
            return _yarn(plain, rope.base, head_dim, scaling), scaling.attention_factor
    raise AssertionError(f"unknown scaling: {rope.scaling!r}")


def _llama3(plain: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    rotations = scaling.original_context * plain / (2 * math.pi)
    # 1: short wavelength, kept. 0: long wavelength, divided by the whole factor.
    kept = (rotations - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    kept = np.clip(kept, 0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: np.ndarray, base: float, head_dim: int, scaling: YarnScaling) -> np.ndarray:
    def find_pair(rotations: float) -> float:
        """Return the (fractional) pair of dimensions with this number of rotations per context."""
        wave = scaling.original_context / (rotations * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(base))

    low, high = find_pair(scaling.beta_fast), find_pair(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return ramp * plain / scaling.factor + (1 - ramp) * plain


def yarn_attention_factor(factor: float | int) -> float:
    """Return YaRN's default attention factor."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def cos_sin_tables(
    ropes: tuple[Rope | None, ...], head_dim: int, positions: Int[Array, "B T"]
) -> Float[Array, "kinds 2 B T half"]:
    """Return cosines and sines for every kind of layer; the identity for kinds without RoPE."""
    tables = []
    for rope in ropes:
        if rope is None:
            ones = jnp.ones((*positions.shape, head_dim // 2), jnp.float32)
            tables.append(jnp.stack([ones, jnp.zeros_like(ones)]))
            continue
        rates, factor = frequencies(rope, head_dim)
        angles = positions.astype(jnp.float32)[..., None] * jnp.float32(rates)[None, None]
        tables.append(jnp.stack([jnp.cos(angles), jnp.sin(angles)]) * factor)
    return jnp.stack(tables)


def rotate(
    x: Float[Array, "B T H D"], cos_sin: Float[Array, "2 #B T half"]
) -> Float[Array, "B T H D"]:
    """Rotate `x` by its positions; computed in float32, returned in the dtype of `x`."""
    cos, sin = cos_sin[0][:, :, None], cos_sin[1][:, :, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Attention(nnx.Module):
    """Projections to and from heads around an attention function."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        width, dim, q_heads = config.width, config.head_dim, config.q_heads
        heads = (("q_heads", q_heads), ("kv_heads", config.kv_heads), ("kv_heads", config.kv_heads))
        self.query, self.key, self.value = (
            init_param(rngs, ("embed", axis, "head_dim"), (width, n, dim), dtype, fan_in=width)
            for axis, n in heads
        )
        self.query_bias, self.key_bias, self.value_bias = (
            zero_param((axis, "head_dim"), (n, dim), dtype, config.has_qkv_bias)
            for axis, n in heads
        )
        names, shape = ("q_heads", "head_dim", "embed"), (q_heads, dim, width)
        self.out = init_param(rngs, names, shape, dtype, fan_in=q_heads * dim)
        self.out_bias = zero_param(("embed",), (width,), dtype, config.has_out_bias)
        norm = lambda: Norm(config, dim, "head_dim", dtype) if config.has_qk_norm else None
        self.query_norm, self.key_norm = norm(), norm()

    def __call__(self, x: Float[Array, "B T width"], attention_fn: InnerAttention, *native: Any):
        """Return (output, auxiliary output of `attention_fn(q, k, v, *native)`)."""
        q = _project_heads(x, self.query, self.query_bias)
        k = _project_heads(x, self.key, self.key_bias)
        v = _project_heads(x, self.value, self.value_bias)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        attended, aux = attention_fn(q, k, v, *native)
        out = jnp.einsum("bthd,hde->bte", attended, self.out[...].astype(x.dtype))
        return _add_bias(out, self.out_bias), aux


class Mlp(nnx.Module):
    """MLP with an optional gate."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dtype):
        width, inner = config.width, config.mlp_width
        wide = lambda: init_param(rngs, ("embed", "mlp"), (width, inner), dtype, fan_in=width)
        bias = lambda size, axis: zero_param((axis,), (size,), dtype, config.has_mlp_bias)
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
