"""A list of items as kernels walk it: packed words in groups, rows cut into launches and parts.

A row takes its items in groups of `slots`. First come careful groups, whose pairs need an element
mask: they hold the partial items, and as many full ones as do not fill a group. Then come plain
groups of full items. Each slot of a group is one int32 word: the number of a block, and two flags.

The list of a launch has to fit into scalar memory, so a long one is cut, between rows, into several
launches; each of these into `parts` of about equal work, one per core. Built by NumPy for a static
layout, by JAX for a traced one, whose launches have the room that any list of its capacity needs.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from xsake.kernels.block_sparse.walk import partial_first
from xsake.layout.ragged import namespace, row_of_item, starts_of

LIVE, PARTIAL = 1, 2
FLAG_BITS = 2
MOST_BLOCKS = 1 << (31 - FLAG_BITS)  # what a word can tell apart
_ROW_WORDS = 2  # where the groups of a row start, and where its plain ones do


class Items(NamedTuple):
    """Ragged rows of block numbers: row `r` owns `row_starts[r] : row_starts[r + 1]`."""

    row_starts: Any  # int32 [R + 1]
    number: Any  # int32 [W]
    is_partial: Any  # bool [W]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The sizes of a cut list, known while tracing.

    Args:
        slots: items of a group.
        parts: cores that share a launch.
        launches: kernels that are launched.
        groups, rows: room of one launch.
    """

    slots: int
    parts: int
    launches: int
    groups: int
    rows: int

    @property
    def words(self) -> int:
        """Words of scalar memory that a launch takes."""
        return self.groups * self.slots + self.rows * _ROW_WORDS


class WorkList(NamedTuple):
    """A list, packed and cut; one more group and row than there is room for, to look ahead into."""

    cut: Cut
    words: Any  # int32 [launches, (groups + 1) * slots]
    items: Any  # int32 like `words`: which item a slot holds
    starts: Any  # int32 [launches, rows + 1]: first group of a row
    middles: Any  # int32 [launches, rows + 1]: its first plain group
    bounds: Any  # int32 [launches, parts + 1]: first row of each part, among all rows
    turns: Any  # int32 [launches]: rows of the longest part


def build(items: Items, slots: int, parts: int, most_words: int, longest: int) -> WorkList:
    """Group the items and cut the rows into launches of at most `most_words` words.

    Args:
        items: the list.
        slots: items of a group.
        parts: cores that share a launch.
        most_words: what scalar memory holds.
        longest: the most items that a row of a traced list can have.
    """
    xp = namespace(items.row_starts)
    counts = items.row_starts[1:] - items.row_starts[:-1]
    starts = starts_of(xp, -(-counts // slots))
    rows, capacity = counts.shape[0], items.number.shape[0]
    room = int(starts[-1]) if xp is np else traced_groups(rows, capacity, slots)
    longest = int(counts.max()) if xp is np else longest
    cut = cut_of(rows, room, longest, slots, parts, most_words)
    middles, words, place = _groups(xp, items, starts, room, slots)
    bounds = _bounds(xp, starts, cut)
    if xp is np:
        cut = _exact(cut, starts, bounds)

    first = starts[bounds[:, 0]][:, None]
    # Past its end a launch looks at what comes next, which is harmless: nothing is done with it.
    group = xp.minimum(first + xp.arange(cut.groups + 1, dtype=xp.int32)[None], room)
    row = xp.minimum(bounds[:, :1] + xp.arange(cut.rows + 1, dtype=xp.int32)[None], rows)
    shape = cut.launches, -1
    return WorkList(
        cut,
        words[group].reshape(shape),
        place[group].reshape(shape),
        starts[row] - first,
        middles[row] - first,
        bounds,
        (bounds[:, 1:] - bounds[:, :-1]).max(1),
    )


def traced_groups(rows: int, capacity: int, slots: int) -> int:
    """The most groups that items of any lengths can make: one more per row than they fill."""
    return rows + capacity // slots


def cut_of(rows: int, groups: int, longest: int, slots: int, parts: int, most_words: int) -> Cut:
    """The fewest launches whose lists fit; as many as rows allow if none does."""
    parts = min(parts, rows)
    whole = cut = Cut(slots, parts, 1, groups, rows)
    row_words = -(-longest // slots) * slots + _ROW_WORDS
    while cut.words > most_words and (cut.launches + 1) * parts <= rows:
        launches = cut.launches + 1
        # Cuts lie between rows, so each of the parts exceeds its share by less than a row.
        words = -(-whole.words // launches) + parts * row_words
        cut = Cut(
            slots, parts, launches, min(groups, words // slots), min(rows, words // _ROW_WORDS)
        )
    return cut


def _exact(cut: Cut, starts, bounds) -> Cut:
    """The same cut without room to spare."""
    first, last = bounds[:, 0], bounds[:, -1]
    return dataclasses.replace(
        cut,
        groups=int((starts[last] - starts[first]).max()),
        rows=int((last - first).max()),
    )


def _groups(xp, items: Items, starts, room: int, slots: int):
    """First plain groups of rows [R + 1]; words and items of every group, [room + 1, slots]."""
    rows = items.row_starts.shape[0] - 1
    order, partial = partial_first(items.row_starts, items.is_partial)
    full = items.row_starts[1:] - items.row_starts[:-1] - partial
    careful = partial + full % slots
    middles = starts[:-1] + -(-careful // slots)
    row = xp.minimum(row_of_item(xp, starts, room + 1), rows - 1)
    group = xp.arange(room + 1, dtype=xp.int32)
    is_plain = group >= middles[row]
    turn = xp.where(
        is_plain, careful[row] + (group - middles[row]) * slots, (group - starts[row]) * slots
    )
    turn = turn[:, None] + xp.arange(slots, dtype=xp.int32)[None]
    live = (is_plain[:, None] | (turn < careful[row][:, None])) & (group < starts[-1])[:, None]
    # A dead slot names what its group begins with.
    place = items.row_starts[row][:, None] + xp.where(live, turn, turn[:, :1])
    place = _some(xp, order)[xp.clip(place, 0, max(order.shape[0] - 1, 0))]
    flags = xp.where(_some(xp, items.is_partial)[place], LIVE | PARTIAL, LIVE)
    words = (_some(xp, items.number)[place] << FLAG_BITS) | xp.where(live, flags, 0)
    return xp.concatenate([middles, starts[-1:]]), words.astype(xp.int32), place


def _some(xp, x):
    """At least one entry, so that an empty list can be looked into."""
    return x if x.shape[0] else xp.zeros(1, x.dtype)


def _bounds(xp, starts, cut: Cut):
    """First row of every part [launches, parts + 1]: whole rows, one at least, work about equal."""
    rows, chunks = starts.shape[0] - 1, cut.launches * cut.parts
    order = xp.arange(chunks, dtype=xp.int32)
    work = starts * cut.slots + xp.arange(rows + 1, dtype=xp.int32) * _ROW_WORDS
    share = -(-work[-1] // chunks)
    first = xp.searchsorted(work[:-1], order * share).astype(xp.int32) - order
    first = np.maximum.accumulate(first) if xp is np else lax.cummax(first)
    first = xp.minimum(first + order, rows - chunks + order)
    first = xp.concatenate([first, xp.full(1, rows, xp.int32)])
    place = np.arange(cut.launches)[:, None] * cut.parts + np.arange(cut.parts + 1)
    return first[place]
