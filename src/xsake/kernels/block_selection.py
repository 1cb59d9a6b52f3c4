"""Selection of the best blocks of every query by their scores."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

# Scores lie below it; the query's own block is above all.
_ALWAYS = 1e30


@dataclasses.dataclass(frozen=True)
class BlockSelection:
    """How many blocks a query selects by their scores, and which ones in any case."""

    block: int  # keys per block
    number: int  # of blocks
    slots: int  # maximum blocks of a query
    first: int = 1  # blocks at the start of a sequence that are always selected
    local: int = 2  # blocks up to the query's own one that are always selected


def select_blocks(
    scores: Float[Array | np.ndarray, "*rest Nk"],
    position: Int[Array, "*rest"],
    start: Int[Array, "*rest"],
    selection: BlockSelection,
) -> Int[Array, "*rest Ns"]:
    """Select the best blocks of every query, best first; -1 in unused slots.

    The query's own block comes first, then those before it and those at the start that are always
    selected; of equal blocks the earlier one wins. No block is selected twice, and none of the
    future.
    """
    number = scores.shape[-1]
    block = jnp.arange(number, dtype=jnp.int32).reshape((1,) * position.ndim + (number,))
    own, zero = (x[..., None] // selection.block for x in (position, start))
    age, index = own - block, block - zero
    # Whole multiples keep their order whatever `first` is; halves would fall below real scores.
    first, local = selection.first - index, selection.first + selection.local - age
    scores = jnp.asarray(scores)
    scores = jnp.where(first > 0, _ALWAYS * first.astype(scores.dtype), scores)
    scores = jnp.where(age < selection.local, _ALWAYS * local.astype(scores.dtype), scores)
    scores = jnp.where((age >= 0) & (index >= 0), scores, -jnp.inf)
    best, blocks = lax.top_k(scores, min(selection.slots, number))
    blocks = jnp.where(best == -jnp.inf, -1, blocks).astype(jnp.int32)
    spare = selection.slots - blocks.shape[-1]
    return jnp.pad(blocks, ((0, 0),) * position.ndim + ((0, spare),), constant_values=-1)
