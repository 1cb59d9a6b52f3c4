"""Visits the items of every row, many rows side by side; knows neither attention nor blocks.

Rows are sorted by length and taken in groups, so that rows of one group end together: a short row
never waits for the longest one of the whole layout. A row takes its partial items one at a time,
under the element mask; then its full items, first several at a time, then two, then one. How a row
is cut depends on its own length alone, so its neighbours cannot change one bit of its result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake.kernels.block_sparse.problem import TileSizes
from xsake.kernels.varying import vary
from xsake.layout.ragged import namespace, row_of_item


class Rows(NamedTuple):
    """Where the items of each row are: from `start` on, the partial ones, then the full ones."""

    start: Any  # int32 [R]
    partial: Any  # int32 [R]
    full: Any  # int32 [R]


class Step(NamedTuple):
    """Which items a group meets now, and what is known about them."""

    items: Any  # what `fetch` returned
    exists: Any  # bool [rows, 1]: rows that have these items; the others wait
    masked: bool  # whether the items are partial


class Visitor(NamedTuple):
    """What is done with a group of rows.

    begin(rows) -> (tile, state): load what stays, open the sums.
    fetch(rows, turns [rows, K], exists) -> items: small integers of the items met at those turns.
    visit(tile, state, shared, step) -> (state, shared): compute one step.
    finish(rows, state, shared) -> shared: store the results; a row past the end is nobody's.
    """

    begin: Callable
    fetch: Callable
    visit: Callable
    finish: Callable


def partial_first(row_starts, is_partial):
    """A new order of the items with the partial ones of each row in front.

    Returns:
        `(order [W], partial [R])`: the old place of each new place, and partial items per row.
    """
    xp = namespace(row_starts, is_partial)
    capacity, rows = is_partial.shape[0], row_starts.shape[0] - 1
    row = row_of_item(xp, row_starts, capacity)
    counted = is_partial & (row < rows)
    before = xp.concatenate([xp.zeros(1, xp.int32), xp.cumsum(counted, dtype=xp.int32)])
    partial = before[row_starts[1:]] - before[row_starts[:-1]]
    row = xp.minimum(row, rows - 1)
    start = row_starts[row]
    place = xp.arange(capacity, dtype=xp.int32)
    rank = before[:-1] - before[start]
    target = start + xp.where(counted, rank, partial[row] + place - start - rank)
    target = xp.where(place < row_starts[-1], target, place)
    if xp is np:
        order = np.empty(capacity, np.int32)
        order[target] = place
        return order, partial
    return jnp.zeros(capacity, jnp.int32).at[target].set(place, unique_indices=True), partial


class Groups(NamedTuple):
    """Rows in the order and the company in which they are walked."""

    padded: Rows  # the row table and one more row, without items
    rows: Any  # int32 [groups, rows per group]; the last group is filled up with that row
    partial: Any  # [groups]: most partial items of a row
    steps: tuple  # for each width [groups]: most steps of that width that a row takes


def _widths(tiles: TileSizes) -> tuple[int, ...]:
    """How many full items a step takes, in the order in which a row takes them."""
    return tuple(dict.fromkeys((tiles.blocks, min(tiles.blocks, 2), 1)))


def _cuts(full, tiles: TileSizes):
    """`(width, first item, steps)` of each part into which a row of `full` items is cut."""
    first = 0 * full
    for width in _widths(tiles):
        steps = (full - first) // width
        yield width, first, steps
        first = first + steps * width


def _groups(rows: Rows, tiles: TileSizes, sets: int) -> Groups:
    xp = namespace(*rows)
    number = rows.full.shape[0]
    order = _sorted(xp, rows, tiles, sets)
    short = xp.full((sets, -order.shape[1] % tiles.rows), number, xp.int32)
    order = xp.concatenate([order, short], 1).reshape(-1, tiles.rows)
    padded = Rows(*(xp.concatenate([x, xp.zeros(1, x.dtype)]) for x in rows))
    steps = tuple(own.max(1) for _, _, own in _cuts(padded.full[order], tiles))
    return Groups(padded, order, padded.partial[order].max(1), steps)


def _sorted(xp, rows: Rows, tiles: TileSizes, sets: int):
    """The rows of each set [sets, rows per set], so that neighbours are cut alike.

    Rows that take as many wide steps as each other are together. What is left of them rises and
    falls in turns, so that the last of them and the first of those with one step less are alike.
    """
    wide, left = rows.full // tiles.blocks, rows.full % tiles.blocks
    keys = -rows.partial, xp.where(wide % 2 == 0, left, -left), -wide
    order = xp.lexsort(tuple(key.reshape(sets, -1) for key in keys), axis=-1)
    return (order + xp.arange(sets)[:, None] * order.shape[1]).astype(xp.int32)


def walked_items(rows: Rows, tiles: TileSizes, sets: int = 1) -> int:
    """Items that `walk` computes, what short rows wait for included; needs concrete rows."""
    groups = _groups(rows, tiles, sets)
    turns = [groups.partial, *(w * n for w, n in zip(_widths(tiles), groups.steps, strict=True))]
    return sum(int(np.asarray(x).sum(dtype=np.int64)) for x in turns) * tiles.rows


def _ever(steps) -> bool:
    """Whether some group takes such a step: what none takes has no loop, and costs no compiling."""
    return not isinstance(steps, np.ndarray) or bool(steps.any())


def walk(
    rows: Rows,
    visitor: Visitor,
    tiles: TileSizes,
    shared: Any,
    *,
    sets: int = 1,
    axes: frozenset[str] = frozenset(),
):
    """Run `visitor` over all rows.

    Args:
        rows: the row table; NumPy if it is known while tracing.
        visitor: what is done with a group of rows.
        tiles: rows of a group, and items of a step.
        shared: the arrays that groups write to, one group after the other.
        sets: into how many equal parts the rows are cut before they are sorted. A part is walked as
            if it were alone, so that sums in `shared` have the order that its own rows give them.
        axes: mesh axes of `shard_map` that the operands vary over.

    Returns:
        `shared` as the last group left it.
    """
    number = rows.full.shape[0]
    groups = _groups(rows, tiles, sets)
    table = Rows(*(jnp.asarray(x) for x in groups.padded))

    def run(shared, group):
        named, partial, steps = group
        limits = Rows(*(x[named][:, None] for x in table))
        own = jnp.minimum(named, number - 1)
        tile, state = visitor.begin(own)
        state = vary(state, axes)

        def sweep(carry, steps, width, masked, first, own_steps):
            """Take `width` items `steps` times, from item `first` on; rows take `own_steps`."""

            def fetch(step):
                exists = step < own_steps
                turns = first + step * width + jnp.arange(width, dtype=jnp.int32)[None]
                return vary((visitor.fetch(own, turns, exists), exists), axes)

            def body(step, carry):
                state, shared, (items, exists) = carry
                now = Step(items, exists, masked)
                # Items are fetched a step ahead: left inside the step, XLA:CPU would fold these
                # look-ups into every element of the gathers that use them.
                return *visitor.visit(tile, state, shared, now), fetch(step + 1)

            return lax.fori_loop(0, steps, body, (*carry, fetch(0)))[:2]

        carry = state, shared
        if _ever(groups.partial):
            carry = sweep(carry, partial, 1, True, 0, limits.partial)
        cuts = _cuts(limits.full, tiles)
        for known, most, (width, first, own_steps) in zip(groups.steps, steps, cuts, strict=True):
            if _ever(known):
                carry = sweep(carry, most, width, False, limits.partial + first, own_steps)
        state, shared = carry
        return visitor.finish(named, state, shared), None

    return lax.scan(run, vary(shared, axes), jax.tree.map(jnp.asarray, tuple(groups[1:])))[0]
