"""Loop over the items of ragged rows, many rows at a time; independent of attention.

Rows are sorted by length and taken in groups, so that the rows of a group end together: a short row
does not wait for the longest one of the whole layout. A row takes its partial items one at a time,
under the element mask; then its full items, first several at a time, then two, then one. How a row
is divided depends on its own length alone, so other rows cannot change one bit of its result.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xsake.kernels.block_sparse.types import TileSizes
from xsake.kernels.sharding import vary
from xsake.layout.csr import namespace


class RowTable(NamedTuple):
    """Items of each row: from `start` on, the partial ones, then the full ones."""

    start: Any  # int32 [R]
    partial: Any  # int32 [R]: number of partial items
    full: Any  # int32 [R]: number of full items


class Step(NamedTuple):
    """Items that a group of rows takes in one iteration."""

    items: Any  # result of `RowBody.lookup`
    exists: Any  # bool [rows, 1]: rows that have these items; the others wait
    is_masked: bool  # whether the items are partial


class RowBody(NamedTuple):
    """Computation of a group of rows.

    prologue(rows) -> (tile, state): load what stays, initialize the sums.
    lookup(rows, index [rows, K], exists) -> items: integers of the items at those indices.
    body(tile, state, shared, step) -> (state, shared): one iteration.
    epilogue(rows, state, shared) -> shared: store the results; rows past the end are dropped.
    """

    prologue: Callable
    lookup: Callable
    body: Callable
    epilogue: Callable


class RowGroups(NamedTuple):
    """Rows sorted by length and batched for the loop."""

    padded: RowTable  # the row table and one more row, without items
    rows: Any  # int32 [groups, rows per group]; the last group is padded with that row
    partial: Any  # [groups]: maximum number of partial items of a row
    steps: tuple  # for each width [groups]: maximum number of steps of that width of a row


def _widths(tiles: TileSizes) -> tuple[int, ...]:
    """Full items per step, in the order in which a row takes them."""
    return tuple(dict.fromkeys((tiles.blocks, min(tiles.blocks, 2), 1)))


def _divide(full, tiles: TileSizes):
    """`(width, first item, number of steps)` of each part of a row of `full` items."""
    first = 0 * full
    for width in _widths(tiles):
        steps = (full - first) // width
        yield width, first, steps
        first = first + steps * width


def _group(table: RowTable, tiles: TileSizes, sets: int) -> RowGroups:
    xp = namespace(*table)
    number = table.full.shape[0]
    order = _sort(xp, table, tiles, sets)
    missing = xp.full((sets, -order.shape[1] % tiles.rows), number, xp.int32)
    order = xp.concatenate([order, missing], 1).reshape(-1, tiles.rows)
    padded = RowTable(*(xp.concatenate([x, xp.zeros(1, x.dtype)]) for x in table))
    steps = tuple(of_row.max(1) for _, _, of_row in _divide(padded.full[order], tiles))
    return RowGroups(padded, order, padded.partial[order].max(1), steps)


def _sort(xp, table: RowTable, tiles: TileSizes, sets: int):
    """The rows of each set [sets, rows per set], rows of similar length next to each other.

    Rows with the same number of wide steps are together. The rest of their length rises and falls
    in turns, so that the last of them and the first of those with one step less are alike.
    """
    wide, rest = table.full // tiles.blocks, table.full % tiles.blocks
    keys = -table.partial, xp.where(wide % 2 == 0, rest, -rest), -wide
    order = xp.lexsort(tuple(key.reshape(sets, -1) for key in keys), axis=-1)
    return (order + xp.arange(sets)[:, None] * order.shape[1]).astype(xp.int32)


def count_items(table: RowTable, tiles: TileSizes, sets: int = 1) -> int:
    """Items that `loop_rows` computes, waiting rows included; needs a concrete table."""
    groups = _group(table, tiles, sets)
    counts = [groups.partial, *(w * n for w, n in zip(_widths(tiles), groups.steps, strict=True))]
    return sum(int(np.asarray(x).sum(dtype=np.int64)) for x in counts) * tiles.rows


def _is_ever(steps) -> bool:
    """Whether a group takes such a step: a loop that none takes is not compiled."""
    return not isinstance(steps, np.ndarray) or bool(steps.any())


def loop_rows(
    table: RowTable,
    row_body: RowBody,
    tiles: TileSizes,
    shared: Any,
    *,
    sets: int = 1,
    axes: frozenset[str] = frozenset(),
):
    """Run `row_body` over all rows; return `shared`, which groups write to one after the other.

    The rows are divided into `sets` equal parts before they are sorted. A part is computed as if it
    were alone, so that sums in `shared` have the order of its own rows. `axes` are the mesh axes of
    `shard_map` that the inputs vary over.
    """
    number = table.full.shape[0]
    groups = _group(table, tiles, sets)
    padded = RowTable(*(jnp.asarray(x) for x in groups.padded))

    def run_group(shared, group):
        padded_rows, partial, steps = group
        counts = RowTable(*(x[padded_rows][:, None] for x in padded))
        rows = jnp.minimum(padded_rows, number - 1)
        tile, state = row_body.prologue(rows)
        carry = vary(state, axes), shared
        loops = [(groups.partial, partial, 1, True, 0, counts.partial)]
        for known, most, (width, first, of_row) in zip(
            groups.steps, steps, _divide(counts.full, tiles), strict=True
        ):
            loops.append((known, most, width, False, counts.partial + first, of_row))
        for known, most, width, is_masked, first, of_row in loops:
            if not _is_ever(known):
                continue

            def lookup(step, width=width, first=first, of_row=of_row):
                exists = step < of_row
                index = first + step * width + jnp.arange(width, dtype=jnp.int32)[None]
                return vary((row_body.lookup(rows, index, exists), exists), axes)

            def body(step, carry, is_masked=is_masked, lookup=lookup):
                state, shared, (items, exists) = carry
                now = Step(items, exists, is_masked)
                # Items are looked up a step ahead: inside the step, XLA:CPU would fold these
                # look-ups into every element of the gathers that use them.
                return *row_body.body(tile, state, shared, now), lookup(step + 1)

            carry = lax.fori_loop(0, most, body, (*carry, lookup(0)))[:2]
        return row_body.epilogue(padded_rows, *carry), None

    return lax.scan(run_group, vary(shared, axes), jax.tree.map(jnp.asarray, tuple(groups[1:])))[0]
