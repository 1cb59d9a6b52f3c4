"""Summaries of keys: overlapping runs, their means, and scores of blocks."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.kernels.compressed.types import CompressedConfig
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


def visible(
    position: Int[Array, "*rest"], start: Int[Array, "*rest"], number: int, config: CompressedConfig
) -> Bool[Array, "*rest Nc"]:
    """Which of the first `number` summaries a query at a position sees."""
    begins = jnp.arange(number, dtype=jnp.int32) * config.stride
    begins = begins.reshape((1,) * position.ndim + (number,))
    is_past = begins + (config.length - 1) <= position[..., None]
    return is_past & (begins >= start[..., None])


def block_scores(
    weight: Float[Array | np.ndarray, "*rest Nc"], config: CompressedConfig, number: int
) -> Float[Array | np.ndarray, "*rest Nk"]:
    """Sum of each summary's weight, as often as its strides lie in the block.

    `score[j] = sum_{m < block/stride, n < length/stride} weight[(block/stride) j + m - n]`, counted
    from 0 (equation 9 of the paper, which counts from 1): the weight of a summary times the number
    of strides that it shares with the block.

    Example:
        >>> import jax.numpy as jnp
        >>> from xsake.kernels.block_selection import BlockSelection
        >>> config = CompressedConfig(32, 16, 1.0, BlockSelection(block=64, number=3, slots=2))
        >>> print(block_scores(jnp.eye(11), config, 3)[:, 1])  # contributions to block 1
        [0. 0. 0. 1. 2. 2. 2. 1. 0. 0. 0.]
    """
    assert config.selection is not None
    per_summary = config.length // config.stride
    per_block = config.selection.block // config.stride
    strides = number * per_block
    spare = max(0, strides - weight.shape[-1])
    pad = ((0, 0),) * (weight.ndim - 1) + ((per_summary - 1, spare),)
    padded = (np if isinstance(weight, np.ndarray) else jnp).pad(weight, pad)
    parts = [padded[..., n : n + strides] for n in range(per_summary)]
    return sum(parts[1:], parts[0]).reshape(*weight.shape[:-1], number, per_block).sum(-1)
