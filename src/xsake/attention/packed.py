"""Sequences packed one after another, moved so that each begins at a block; and back again."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from xsake.errors import ShapeError


class Packed(NamedTuple):
    """Where packed tokens go. The tokens after the last sequence are one more, which is dropped."""

    place: Int[Array, " Tq"]  # of every packed token among the aligned ones
    source: Int[Array, " Tk"]  # of every aligned token; the number of packed ones for padding
    sequence: Int[Array, " Tk"]  # of every aligned token
    start: Int[Array, " Tk"]  # aligned place where the sequence of each aligned token begins
    position: Int[Array, " Tq"]  # of every packed token in its sequence
    is_real: Array  # [Tq] bool: the token belongs to a sequence

    def aligned(self, x):
        """[1, T, ...] in aligned order, zeros between the sequences."""
        x = jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2)))
        return jnp.take(x, self.source, axis=1, mode="clip")

    def packed(self, x):
        """The way back; zeros for tokens of no sequence."""
        found = jnp.take(x, self.place, axis=1, mode="clip")
        shape = (1, self.is_real.shape[0]) + (1,) * (x.ndim - 2)
        return jnp.where(self.is_real.reshape(shape), found, 0)


def pack(cu_seqlens: Int[Array, " S"], tokens: int, block: int) -> Packed:
    """Each sequence at a multiple of `block`; how many tokens that takes is known while tracing.

    Args:
        cu_seqlens: where sequences begin, and where the last one ends.
        tokens: packed ones.
        block: tokens.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError(
            "`cu_seqlens` does not fit",
            got=f"{cu_seqlens.dtype} {cu_seqlens.shape}",
            expected="integers [sequences + 1], from 0 on, never falling",
            fix="lengths (3, 5) of two sequences are [0, 3, 8]",
        )
    ends = jnp.append(jnp.asarray(cu_seqlens, jnp.int32), tokens)
    begins, ends = ends[:-1], ends[1:]
    rooms = -(-(ends - begins) // block) * block
    aligned_ends = jnp.cumsum(rooms)
    aligned_begins = aligned_ends - rooms
    number = begins.shape[0]
    room = -(-(tokens + number * (block - 1)) // block) * block
    token = jnp.arange(tokens, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, token, side="right"), number - 1)
    position = token - begins[owner]
    place = aligned_begins[owner] + position
    source = jnp.full(room, tokens, jnp.int32).at[place].set(token, mode="drop")
    slot = jnp.arange(room, dtype=jnp.int32)
    sequence = jnp.searchsorted(aligned_ends, slot, side="right").astype(jnp.int32)
    start = jnp.append(aligned_begins, aligned_ends[-1])[jnp.minimum(sequence, number)]
    return Packed(place, source, sequence, start, position, owner < number - 1)
