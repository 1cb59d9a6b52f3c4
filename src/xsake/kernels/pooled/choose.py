"""From weights of summaries to blocks of keys: overlap-weighted sums, then the best few."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from xsake.kernels.pooled.problem import Choosing, Problem

# Above every sum of weights, which is at most the number of heads; the own block is above all.
_ALWAYS = 1e30


def visible(
    position: Int[Array, "*rest"], start: Int[Array, "*rest"], number: int, problem: Problem
) -> Bool[Array, "*rest Nc"]:
    """Which of the first `number` summaries a query at a position sees."""
    begins = jnp.arange(number, dtype=jnp.int32) * problem.stride
    begins = begins.reshape((1,) * position.ndim + (number,))
    is_past = begins + (problem.length - 1) <= position[..., None]
    return is_past & (begins >= start[..., None])


def block_scores(
    weight: Float[Array | np.ndarray, "*rest Nc"], problem: Problem, number: int
) -> Float[Array | np.ndarray, "*rest Nk"]:
    """Sum of each summary's weight, as often as its strides lie in the block.

    `score[j] = sum_{m < block/stride, n < length/stride} weight[(block/stride) j + m - n]`, counted
    from 0 (equation 9 of the paper, which counts from 1): the weight of a summary times the number
    of strides that it shares with the block.

    Example:
        >>> import jax.numpy as jnp
        >>> from xsake.kernels.pooled.problem import Choosing
        >>> problem = Problem(32, 16, 1.0, Choosing(block=64, number=3, slots=2))
        >>> print(block_scores(jnp.eye(11), problem, 3)[:, 1])  # who adds to the second block
        [0. 0. 0. 1. 2. 2. 2. 1. 0. 0. 0.]
    """
    assert problem.choosing is not None
    per_summary = problem.length // problem.stride
    per_block = problem.choosing.block // problem.stride
    strides = number * per_block
    spare = max(0, strides - weight.shape[-1])
    pad = ((0, 0),) * (weight.ndim - 1) + ((per_summary - 1, spare),)
    padded = (np if isinstance(weight, np.ndarray) else jnp).pad(weight, pad)
    parts = [padded[..., n : n + strides] for n in range(per_summary)]
    return sum(parts[1:], parts[0]).reshape(*weight.shape[:-1], number, per_block).sum(-1)


def chosen(
    scores: Float[Array | np.ndarray, "*rest Nk"],
    position: Int[Array, "*rest"],
    start: Int[Array, "*rest"],
    choosing: Choosing,
) -> Int[Array, "*rest Ns"]:
    """The best blocks of every query, best first, and -1 where there are no more.

    The query's own block comes first, then those before it and those at the start that are always
    chosen; of equal blocks the earlier one wins. No block is chosen twice, and none of the future.
    """
    number = scores.shape[-1]
    block = jnp.arange(number, dtype=jnp.int32).reshape((1,) * position.ndim + (number,))
    own, zero = (x[..., None] // choosing.block for x in (position, start))
    age, index = own - block, block - zero
    # Whole multiples keep their order whatever `first` is; halves would fall below real scores.
    first, local = choosing.first - index, choosing.first + choosing.local - age
    scores = jnp.asarray(scores)
    scores = jnp.where(first > 0, _ALWAYS * first.astype(scores.dtype), scores)
    scores = jnp.where(age < choosing.local, _ALWAYS * local.astype(scores.dtype), scores)
    scores = jnp.where((age >= 0) & (index >= 0), scores, -jnp.inf)
    best, found = lax.top_k(scores, min(choosing.slots, number))
    found = jnp.where(best == -jnp.inf, -1, found).astype(jnp.int32)
    spare = choosing.slots - found.shape[-1]
    return jnp.pad(found, ((0, 0),) * position.ndim + ((0, spare),), constant_values=-1)
