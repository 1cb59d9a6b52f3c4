"""Chooses blocks from estimated masses inside a jitted program: exact counts, without a sort."""

import enum
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.hads.budget import AlwaysOn

# Classes of weight: a float's exponent and the first two bits of its fraction, from 1 down to
# 2^-20; whatever is lighter is one class.
_DROPPED = 21
_CLASSES = 20 * 4 + 1
_LIGHTEST = int(np.float32(2.0**-20).view(np.int32)) >> _DROPPED


class Scope(enum.StrEnum):
    """What one budget is spread over at run time."""

    ROW = "row"  # every row has its own count: nothing depends on later tokens
    HEAD = "head"  # a head's blocks go to the rows that gain most
    LAYER = "layer"  # a layer's blocks go to the heads and rows that gain most


@functools.partial(jax.jit, static_argnames=("always", "scope"))
def choose(
    masses: Float[Array, "B Hq Nq Nk"],
    counts: Int[Array | np.ndarray, "Hq Nq"],
    *,
    always: AlwaysOn,
    scope: Scope = Scope.LAYER,
) -> Bool[Array, "B Hq Nq Nk"]:
    """The always-on blocks and those that gain most, exactly as many as `counts` add up to.

    A block gains `log(c / (c - m))`, m being its own mass and c that of all blocks of its row that
    are at least as heavy, always-on ones included: what greedy choice by log-mass gains from it.
    Blocks of a row are taken heaviest first; among equals the first.

    Args:
        masses: estimated share of each block in the attention of a row's queries.
        counts: blocks of each row, always-on ones counted; a wider scope uses their sum only.
        always: blocks that are chosen in any case.
        scope: what shares one budget.

    Returns:
        True for chosen blocks; a block that causality hides is never chosen.
    """
    batch, heads, rows, _ = masses.shape
    ranks = _ranks(masses, always)
    groups = {Scope.ROW: heads * rows, Scope.HEAD: heads, Scope.LAYER: 1}[scope]
    totals = jnp.asarray(counts, jnp.int32).reshape(groups, -1).sum(1)
    flat = ranks.reshape(batch * groups, -1)
    return _largest(flat, jnp.tile(totals, batch)).reshape(masses.shape)


def _ranks(masses, always: AlwaysOn) -> Int[Array, "B Hq Nq Nk"]:
    """Integers in the order in which blocks are taken; -1 for hidden blocks."""
    n = masses.shape[-1]
    visible, forced = np.tri(n, dtype=bool), always.grid(n)
    masses = jnp.where(visible, masses, 0).astype(jnp.float32)
    loose = jnp.where(forced, 0, masses)
    # Sums over all blocks at least as heavy, by classes of weight: sorting rows would cost a CPU
    # several times as much, and the order inside a row stays exact.
    bits = jax.lax.bitcast_convert_type(masses, jnp.int32)
    own_class = jnp.clip(_LIGHTEST + _CLASSES - 1 - (bits >> _DROPPED), 0, _CLASSES - 1)
    sum_from = lambda lightest: jnp.where(own_class <= lightest, loose, 0).sum(-1)
    heavier = jax.lax.map(sum_from, np.arange(_CLASSES))
    kept = jnp.moveaxis(heavier, 0, -1) + jnp.where(forced, masses, 0).sum(-1, keepdims=True)
    kept = jnp.take_along_axis(kept, own_class, -1)
    gain = masses / jnp.maximum(kept, math.ldexp(1, -60))
    # The bits of floats that are not negative are ordered as the floats are.
    bits = jax.lax.bitcast_convert_type(gain, jnp.int32)
    return jnp.where(visible, jnp.where(forced, np.iinfo(np.int32).max, bits), -1)


def _largest(ranks: Int[Array, "X Y"], counts: Int[Array, " X"]) -> Bool[Array, "X Y"]:
    """Exactly `counts` of the largest that are not negative, or all of those; ties: the first."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = (ranks >= middle[:, None]).sum(1) >= counts
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    start = jnp.zeros_like(counts), jnp.full_like(counts, np.iinfo(np.int32).max)
    level, _ = jax.lax.fori_loop(0, 31, halve, start)
    above, equal = ranks > level[:, None], ranks == level[:, None]
    room = counts - above.sum(1)
    return above | (equal & (jnp.cumsum(equal, 1) <= room[:, None]))
