"""Rotary position embeddings: scaled frequencies and the rotation."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from xsake.model.config import LinearScaling, Llama3Scaling, Rope, YarnScaling


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
