"""Packed sequences of several lengths: align them to block boundaries, and undo it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from xsake.errors import ShapeError, UnsupportedError


class PackedSequences(NamedTuple):
    """Index maps between packed and block-aligned tokens.

    Tokens after the last sequence form an extra sequence, which is dropped.
    """

    aligned_index: Int[Array, " Tq"]  # aligned index of each packed token
    source: Int[Array, " Tk"]  # packed index of each aligned token; out of range for padding
    sequence: Int[Array, " Tk"]  # sequence of each aligned token
    start: Int[Array, " Tk"]  # aligned start of the sequence of each aligned token
    position: Int[Array, " Tq"]  # position of each packed token in its sequence
    is_valid: Bool[Array, " Tq"]  # the packed token belongs to a sequence

    @property
    def is_padding(self) -> Bool[Array, " Tk"]:
        """Whether an aligned token is padding."""
        return self.source == self.position.shape[0]

    def first_block(self, size: int) -> Int[Array, "1 Tk 1 1"]:
        """Return the block at which the sequence of each aligned token starts."""
        return (self.start // size)[None, :, None, None]

    def align(self, x: Array) -> Array:
        """Reorder [1, T, ...] to aligned order, with zeros between sequences."""
        x = jnp.pad(x, ((0, 0), (0, 1), *((0, 0),) * (x.ndim - 2)))
        return jnp.take(x, self.source, axis=1, mode="clip")

    def unalign(self, x: Array) -> Array:
        """Invert `align`; tokens without a sequence are zero."""
        values = jnp.take(x, self.aligned_index, axis=1, mode="clip")
        shape = (1, self.is_valid.shape[0]) + (1,) * (x.ndim - 2)
        return jnp.where(self.is_valid.reshape(shape), values, 0)


def align_sequences(cu_seqlens: Int[Array, " S"], tokens: int, block: int) -> PackedSequences:
    """Align each sequence to a multiple of `block`; the aligned length is static.

    Args:
        cu_seqlens: cumulative sequence lengths, starting at 0.
        tokens: number of packed tokens.
        block: block size in tokens.
    """
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
        raise ShapeError(
            "cu-seqlens",
            "invalid `cu_seqlens`",
            got=f"{cu_seqlens.dtype} {cu_seqlens.shape}",
            expected="integers [sequences + 1], non-decreasing from 0",
            fix="lengths (3, 5) of two sequences are [0, 3, 8]",
        )
    ends = jnp.append(jnp.asarray(cu_seqlens, jnp.int32), tokens)
    begins, ends = ends[:-1], ends[1:]
    padded_lengths = -(-(ends - begins) // block) * block
    aligned_ends = jnp.cumsum(padded_lengths)
    aligned_begins = aligned_ends - padded_lengths
    num_sequences = begins.shape[0]
    padded_tokens = -(-(tokens + num_sequences * (block - 1)) // block) * block
    token = jnp.arange(tokens, dtype=jnp.int32)
    owner = jnp.minimum(jnp.searchsorted(ends, token, side="right"), num_sequences - 1)
    position = token - begins[owner]
    aligned_index = aligned_begins[owner] + position
    source = jnp.full(padded_tokens, tokens, jnp.int32).at[aligned_index].set(token, mode="drop")
    slot = jnp.arange(padded_tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(aligned_ends, slot, side="right").astype(jnp.int32)
    start = jnp.append(aligned_begins, aligned_ends[-1])[jnp.minimum(sequence, num_sequences)]
    return PackedSequences(
        aligned_index, source, sequence, start, position, owner < num_sequences - 1
    )


def pack_sequences(
    q: Float[Array, "B Tq Hq D"], cu_seqlens: Any, block: int, mesh: Mesh | None
) -> PackedSequences:
    """Check the arguments of a call with packed sequences, and align them to blocks."""
    if mesh is not None:
        raise UnsupportedError(
            "packed-mesh",
            "packed sequences are not supported on a mesh",
            got=f"cu_seqlens, and a mesh of {mesh.size} devices",
            expected="one of the two",
            fix="use one batch row per sequence",
        )
    if q.shape[0] != 1:
        raise ShapeError(
            "packed-batch",
            "packed sequences need batch size 1",
            got=f"q {q.shape}",
            expected="q [1, T, Hq, D]",
            fix="concatenate all sequences and pass their cumulative lengths as cu_seqlens",
        )
    return align_sequences(jnp.asarray(cu_seqlens), q.shape[1], block)
