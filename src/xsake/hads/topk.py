"""Top-k selection of blocks from estimated masses, jit-compatible, exact counts, no sort."""

import enum
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.hads.budget import ForcedBlocks

# Bins of mass: a float's exponent and the first two bits of its mantissa, from 1 down to 2^-20;
# smaller masses share one bin.
_DROPPED = 21
_CLASSES = 20 * 4 + 1
_LIGHTEST = int(np.float32(2.0**-20).view(np.int32)) >> _DROPPED


class BudgetScope(enum.StrEnum):
    """Unit that shares one budget at run time."""

    ROW = "row"  # a fixed count per row: no dependence on later tokens
    HEAD = "head"  # the rows of a head compete
    LAYER = "layer"  # the heads and rows of a layer compete


@functools.partial(jax.jit, static_argnames=("forced", "scope"))
def choose(
    masses: Float[Array, "B Hq Nq Nk"],
    counts: Int[Array | np.ndarray, "*B Hq Nq"],
    *,
    forced: ForcedBlocks,
    scope: BudgetScope = BudgetScope.LAYER,
    rows: Int[Array | np.ndarray, "#B Nq"] | None = None,
) -> Bool[Array, "B Hq Nq Nk"]:
    """Select the forced blocks and those of the largest gain, exactly `counts.sum()` per group.

    The gain of a block of mass `m` is `log(c / (c - m))`, with `c` the mass of all blocks of its
    row that are at least as heavy, forced ones included: its gain in greedy selection by log-mass.
    Blocks of a row are taken in descending mass; ties go to the first. `counts` includes forced
    blocks; scopes wider than a row use their sum only. All selected blocks are causally visible.
    `rows` numbers the query blocks; None: all, from 0 on.
    """
    batch, heads, num_rows, _ = masses.shape
    rows = np.arange(num_rows)[None] if rows is None else rows
    ranks = _block_ranks(masses, forced, rows[:, None, :, None])
    groups = {BudgetScope.ROW: heads * num_rows, BudgetScope.HEAD: heads, BudgetScope.LAYER: 1}
    groups = groups[scope]
    totals = jnp.broadcast_to(jnp.asarray(counts, jnp.int32), masses.shape[:3])
    totals = totals.reshape(batch * groups, -1).sum(1)
    return _largest(ranks.reshape(batch * groups, -1), totals).reshape(masses.shape)


def _block_ranks(masses, forced: ForcedBlocks, row) -> Int[Array, "B Hq Nq Nk"]:
    """Return integers that sort blocks by selection order; -1 for masked blocks."""
    column = np.arange(masses.shape[-1])[None, None, None]
    visible, forced_grid = column <= row, forced.includes(row, column)
    masses = jnp.where(visible, masses, 0).astype(jnp.float32)
    loose = jnp.where(forced_grid, 0, masses)
    # Sums over all blocks at least as heavy, by bins: sorting rows costs a CPU several times as
    # much, and the order inside a row stays exact.
    bits = jax.lax.bitcast_convert_type(masses, jnp.int32)
    bins = jnp.clip(_LIGHTEST + _CLASSES - 1 - (bits >> _DROPPED), 0, _CLASSES - 1)
    sum_from = lambda lightest: jnp.where(bins <= lightest, loose, 0).sum(-1)
    heavier = jax.lax.map(sum_from, np.arange(_CLASSES))
    kept = jnp.moveaxis(heavier, 0, -1) + jnp.where(forced_grid, masses, 0).sum(-1, keepdims=True)
    kept = jnp.take_along_axis(kept, bins, -1)
    gain = masses / jnp.maximum(kept, math.ldexp(1, -60))
    # Bit patterns of non-negative floats have the order of the floats.
    bits = jax.lax.bitcast_convert_type(gain, jnp.int32)
    return jnp.where(visible, jnp.where(forced_grid, np.iinfo(np.int32).max, bits), -1)


def _largest(ranks: Int[Array, "X Y"], counts: Int[Array, " X"]) -> Bool[Array, "X Y"]:
    """Select exactly `counts` of the largest non-negative ranks, or all; ties go to the first."""

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        enough = (ranks >= middle[:, None]).sum(1) >= counts
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    start = jnp.zeros_like(counts), jnp.full_like(counts, np.iinfo(np.int32).max)
    level, _ = jax.lax.fori_loop(0, 31, halve, start)
    above, equal = ranks > level[:, None], ranks == level[:, None]
    remaining = counts - above.sum(1)
    return above | (equal & (jnp.cumsum(equal, 1) <= remaining[:, None]))
