"""Overlapping runs of keys or values, and their means."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from xsake.kernels.validation import sum_dtype


def num_summaries(tokens: int, length: int, stride: int) -> int:
    """Number of whole runs, at least one; an incomplete run is not visible."""
    return max(1, (tokens - length) // stride + 1)


def runs(
    x: Float[Array, "B Tk Hk D"], length: int, stride: int
) -> Float[Array, "B Nc length Hk D"]:
    """Run i holds tokens `i * stride` to `i * stride + length - 1`.

    Example:
        >>> import jax.numpy as jnp
        >>> x = jnp.arange(8.0).reshape(1, 8, 1, 1)
        >>> print(runs(x, length=4, stride=2)[0, :, :, 0, 0])
        [[0. 1. 2. 3.]
         [2. 3. 4. 5.]
         [4. 5. 6. 7.]]
    """
    parts = _strides(x, length, stride)
    number = num_summaries(x.shape[1], length, stride)
    return jnp.concatenate([parts[:, n : n + number] for n in range(length // stride)], axis=2)


def means(x: Float[Array, "B Tk Hk D"], length: int, stride: int) -> Float[Array, "B Nc Hk D"]:
    """The mean of every run, without an array of the runs."""
    wide = x.astype(sum_dtype(x.dtype))
    sums = _strides(wide, length, stride).sum(2)
    number = num_summaries(x.shape[1], length, stride)
    parts = [sums[:, n : n + number] for n in range(length // stride)]
    return (sum(parts[1:], parts[0]) / length).astype(x.dtype)


def _strides(x: Array, length: int, stride: int):
    """[B, strides, stride, Hk, D], with as many strides as whole runs need."""
    number = num_summaries(x.shape[1], length, stride)
    tokens = (number - 1) * stride + length
    x = jnp.pad(x[:, :tokens], ((0, 0), (0, max(0, tokens - x.shape[1])), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], tokens // stride, stride, *x.shape[2:])
