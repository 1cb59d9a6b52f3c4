"""Inputs and numbers of a call that scores and selects blocks."""

import dataclasses
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from xsake.kernels.block_selection import BlockSelection
from xsake.kernels.validation import sum_dtype

Pooling = Literal["max", "mean"]


@dataclasses.dataclass(frozen=True)
class TopBlocksConfig:
    """Numbers of a call: hashable, part of the key of a compiled program."""

    selection: BlockSelection
    groups: int = 1  # lists of blocks per query
    pooling: Pooling = "max"  # over the scores of the keys of a block; mean: of the keys themselves
    has_relu: bool = False  # of the products, before the index heads of a group are added


class TopBlocksInputs(NamedTuple):
    """Arrays of a call.

    The score of a key is the sum of `weight * q.k` over the index heads of a group. A query sees
    the keys between the start of its sequence, which is the start of a block, and itself.
    """

    q: Float[Array, "B Tq Hi D"]
    k: Float[Array, "B Tk Hs D"]  # Hs: 1, or one head per group
    weights: Float[Array, "B Tq Hi"] | None = None  # None: ones
    q_positions: Int[Array, "Bp Tq"] | None = None  # None: query i is at position i
    starts: Int[Array, "Bp Tq"] | None = None  # where each query's sequence begins; None: at 0

    @property
    def dtype(self):
        """Scores are float32 at least, float64 for float64 inputs."""
        return sum_dtype(self.q.dtype)

    @property
    def bounds(self) -> tuple[Int[Array, "B Tq"], Int[Array, "B Tq"]]:
        """Position of every query, and where its sequence begins."""
        shape = self.q.shape[:2]
        at = jnp.arange(shape[1], dtype=jnp.int32) if self.q_positions is None else self.q_positions
        starts = jnp.int32(0) if self.starts is None else self.starts
        return jnp.broadcast_to(at, shape), jnp.broadcast_to(starts, shape)


class ScoredKeys(NamedTuple):
    """Keys of a call, or the means of its blocks."""

    k: Float[Array, "B N Hs D"]
    tokens: int  # that each of them stands for

    def visible(
        self, first: Int[Array, ""] | int, position: Int[Array, "B T"], start: Int[Array, "B T"]
    ) -> Bool[Array, "B T N"]:
        """Whether queries see each key as a whole; `first` is the number of the first one."""
        begin = (first + jnp.arange(self.k.shape[1], dtype=jnp.int32)[None, None]) * self.tokens
        return (begin + (self.tokens - 1) <= position[..., None]) & (begin >= start[..., None])


def pool_keys(inputs: TopBlocksInputs, config: TopBlocksConfig) -> ScoredKeys:
    """Return the keys in the dtype of scores, padded to whole blocks, or the mean of each block.

    The mean of the last block is that of the keys it has; a query sees it only once it is whole.
    """
    block, number = config.selection.block, config.selection.number
    tokens = inputs.k.shape[1]
    k = inputs.k.astype(inputs.dtype)
    k = jnp.pad(k, ((0, 0), (0, number * block - tokens), (0, 0), (0, 0)))
    if config.pooling == "max":
        return ScoredKeys(k, 1)
    sums = k.reshape(k.shape[0], number, block, *k.shape[2:]).sum(2)
    sizes = jnp.clip(tokens - jnp.arange(number) * block, 1, block).astype(k.dtype)
    return ScoredKeys(sums / sizes[None, :, None, None], block)


def finite_scores(scores: Float[Array, "*rest"]) -> Float[Array, "*rest"]:
    """Replace what is not a number or infinite; -inf stays, for what a query does not see."""
    limit = 1e29  # below what forced blocks have
    return jnp.where(scores == -jnp.inf, scores, jnp.clip(jnp.nan_to_num(scores), -limit, limit))
