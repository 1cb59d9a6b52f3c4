"""Visits the items of every row, many rows side by side; knows neither attention nor blocks.

Rows are sorted by length and taken in groups, so that rows of one group end together: a short row
never waits for the longest one of the whole layout. Inside a row, items that need no element mask
come first and go several at a time; the others follow one at a time.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake.kernels.block_sparse.problem import TileSizes
from xsake.layout.ragged import namespace, row_of_item


class Rows(NamedTuple):
    """Where the items of each row are: `start .. start + count`, the first `full` of them full."""

    start: Any  # int32 [R]
    full: Any  # int32 [R]
    count: Any  # int32 [R]


class Visitor(NamedTuple):
    """What is done with a group of rows.

    begin(rows) -> (tile, state): load what stays, open the sums.
    fetch(rows, turns) -> items: small integers of the items that `rows` meet at `turns` [K].
    visit(tile, state, shared, items, exists) -> (state, shared): compute one step. `exists` is None
        when all items are there and full, else bool [rows per group, 1].
    finish(tile, state) -> results [rows per group, ...].
    """

    begin: Callable
    fetch: Callable
    visit: Callable
    finish: Callable


def full_first(row_starts, is_partial):
    """A new order of the items with the full ones of each row in front.

    Returns:
        `(order [W], full [R])`: the old place of each new place, and full items per row.
    """
    xp = namespace(row_starts, is_partial)
    capacity, rows = is_partial.shape[0], row_starts.shape[0] - 1
    row = row_of_item(xp, row_starts, capacity)
    is_full = ~is_partial & (row < rows)
    zero = xp.zeros(1, xp.int32)
    before = xp.concatenate([zero, xp.cumsum(is_full, dtype=xp.int32)])
    full = before[row_starts[1:]] - before[row_starts[:-1]]
    row = xp.minimum(row, rows - 1)
    start = row_starts[row]
    place = xp.arange(capacity, dtype=xp.int32)
    rank = before[:-1] - before[start]
    target = start + xp.where(is_full, rank, full[row] + place - start - rank)
    target = xp.where(place < row_starts[-1], target, place)
    if xp is np:
        order = np.empty(capacity, np.int32)
        order[target] = place
        return order, full
    return jnp.zeros(capacity, jnp.int32).at[target].set(place, unique_indices=True), full


class Groups(NamedTuple):
    """Rows in the order and the company in which they are walked."""

    padded: Rows  # the row table and one more row, without items
    rows: Any  # int32 [groups, rows per group]; the last group is filled up with that row
    wide_steps: Any  # [groups]: steps of several full items that every row of the group can take
    longest: Any  # [groups]: items of the longest row, which all rows of the group wait for


def _groups(rows: Rows, tiles: TileSizes) -> Groups:
    xp = namespace(*rows)
    number = rows.count.shape[0]
    order = xp.argsort(-rows.count, stable=True).astype(xp.int32)
    groups = -(-number // tiles.rows)
    short = groups * tiles.rows - number
    order = xp.concatenate([order, xp.full(short, number, xp.int32)]).reshape(groups, -1)
    padded = Rows(*(xp.concatenate([x, xp.zeros(1, x.dtype)]) for x in rows))
    wide_steps = padded.full[order].min(1) // tiles.blocks
    return Groups(padded, order, wide_steps, padded.count[order].max(1))


def walked_items(rows: Rows, tiles: TileSizes) -> int:
    """Items that `walk` computes, what short rows wait for included; needs concrete rows."""
    groups = _groups(rows, tiles)
    return int(np.asarray(groups.longest).sum(dtype=np.int64)) * tiles.rows


def walk(rows: Rows, visitor: Visitor, tiles: TileSizes, shared: Any = ()):
    """Run `visitor` over all rows.

    Args:
        rows: the row table; NumPy if it is known while tracing.
        shared: sums that all groups add to.

    Returns:
        `(results [R, ...], shared)`, results in the order of the rows.
    """
    number = rows.count.shape[0]
    groups = _groups(rows, tiles)
    padded = groups.padded

    def run(shared, group):
        own, steps, last = group
        count = jnp.asarray(padded.count)[own][:, None]
        own = jnp.minimum(own, number - 1)
        tile, state = visitor.begin(own)

        def sweep(carry, first, steps, width, masked):
            def fetch(step):
                turns = first + step * width + jnp.arange(width, dtype=jnp.int32)
                return visitor.fetch(own, turns), turns[None] < count

            def body(step, carry):
                state, shared, (items, exists) = carry
                exists = exists if masked else None
                state, shared = visitor.visit(tile, state, shared, items, exists)
                # Fetched a step ahead: left inside the step, XLA:CPU would fold these look-ups
                # into every element of the gathers that use them.
                return state, shared, fetch(step + 1)

            return lax.fori_loop(0, steps, body, (*carry, fetch(0)))[:2]

        carry = sweep((state, shared), 0, steps, tiles.blocks, False)
        done = steps * tiles.blocks
        state, shared = sweep(carry, done, last - done, 1, True)
        return shared, visitor.finish(tile, state)

    xs = tuple(jnp.asarray(x) for x in (groups.rows, groups.wide_steps, groups.longest))
    shared, results = lax.scan(run, shared, xs)
    back = namespace(*rows).argsort(groups.rows.reshape(-1), stable=True)[:number]
    results = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[jnp.asarray(back)], results)
    return results, shared
