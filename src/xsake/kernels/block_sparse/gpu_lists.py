"""The lists that GPU kernels walk for a call, and what walking them costs; launches nothing."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xsake.kernels.block_sparse import cost, gpu_pieces, ragged_grid
from xsake.kernels.block_sparse.gpu_pieces import Pieces
from xsake.kernels.block_sparse.mask_tiles import mask_tiles
from xsake.kernels.block_sparse.problem import Operands, TileSizes
from xsake.kernels.block_sparse.ragged_grid import RaggedGrid
from xsake.kernels.block_sparse.rule import Rule
from xsake.kernels.block_sparse.split import split_rule
from xsake.kernels.block_sparse.walk import partial_first
from xsake.layout.ragged import namespace

# Tensor cores take 64 rows of the side that owns results: 16 for each of four warps.
OWN_TILE = 64
# Elementwise steps of rules that Mosaic GPU 0.12 cannot lower, or only for signed numbers.
_MISSING = ("population_count", "clz")


class Lists(NamedTuple):
    """What a kernel reads of a list, from global memory, one number at a time."""

    order: Any  # int32 [P]: pieces of rows, longest first
    rows: Any  # int32 [P]: the row of a piece, in that order
    starts: Any  # int32 [P]: its first item
    stops: Any  # int32 [P]: and the one after its last
    middles: Any  # int32 [P]: its first item without an element mask
    numbers: Any  # int32 [W]: block of an item
    shown: Any  # int32 [W]: element mask of an item
    tables: Any  # int32: the rule's integers of every head


@dataclasses.dataclass(frozen=True)
class Tile:
    """How blocks of one side are cut into what a kernel takes at once.

    Args:
        block: tokens of a block.
        tile: tokens of a tile.
    """

    block: int
    tile: int

    @property
    def parts(self) -> int:
        """Tiles of a block."""
        return -(-self.block // self.tile)

    @property
    def room(self) -> int:
        """Tokens of a block, with what its last tile lacks."""
        return self.parts * self.tile

    @property
    def is_padded(self) -> bool:
        return self.room != self.block


@dataclasses.dataclass(frozen=True, eq=False)
class Listing:
    """A list and how it is walked.

    Args:
        listed: the layout, or its transpose.
        grid: what the list's numbers mean.
        lists: the list, in the order in which it is walked.
        first: int32 [R + 1], first piece of a row.
        most: pieces of one row; 1: all rows are whole.
        rule: the mask's formula, the reason why it has none, or None if there is no mask.
        own, met: tiles of the side that owns results, and of the other one.
        shown: element masks of blocks, [..., block_q, block_kv]; None unless the rule needs them.
    """

    listed: Any
    grid: RaggedGrid
    lists: Lists
    first: Any
    most: int
    rule: Rule | str | None
    own: Tile
    met: Tile
    shown: Any

    @property
    def programs(self) -> int:
        """Thread blocks: one for each tile of a piece."""
        return self.lists.rows.shape[0] * self.grid.copies * self.own.parts

    @property
    def has_careful(self) -> bool:
        """Whether there may be items that need an element mask."""
        known = self.listed.is_static
        return self.pads_keys or not known or bool(np.any(np.asarray(self.listed.is_partial)))

    @property
    def has_plain(self) -> bool:
        """Whether there may be items that need none."""
        known = self.listed.is_static
        return not self.pads_keys and (not known or not np.all(np.asarray(self.listed.is_partial)))

    @property
    def pads_keys(self) -> bool:
        """Whether tiles hold keys that no block has: then every item needs an element mask."""
        return (self.own if self.grid.is_kv_major else self.met).is_padded


def by_query(operands: Operands, met_tile: int) -> Listing:
    """Rows are query blocks."""
    layout = operands.layout
    own, met = Tile(layout.block_q, OWN_TILE), Tile(layout.block_kv, met_tile)
    return _listing(layout, own, met, operands)


def by_key(operands: Operands, met_tile: int) -> Listing:
    """Rows are kv blocks, items the query blocks that see them."""
    layout = operands.layout
    transposed = layout.transpose(operands.k.shape[2], operands.q.shape[2])
    own, met = Tile(layout.block_kv, OWN_TILE), Tile(layout.block_q, met_tile)
    return _listing(transposed, own, met, operands)


def rule_of(mask) -> Rule | str | None:
    """The formula of a mask as GPU kernels can compute it, or why there is none."""
    with _no_named_device():
        rule = None if mask is None else split_rule(mask)
    if isinstance(rule, Rule):
        for step in rule.steps:
            if step.operation in _MISSING:
                return f"the rule of {mask!r} uses {step.operation!r}"
    return rule


def walked(operands: Operands, met_tiles: tuple[int, int]) -> tuple[cost.Walked, cost.Walked]:
    """What walking costs, by query and by key."""
    layout = operands.layout
    if not cost.is_known(*jax.tree.leaves(layout)):
        copies = (operands.q.shape[0] // layout.batch) * (operands.q.shape[2] // layout.heads)
        most = cost.Walked(TileSizes(1, 1), None, True, 1, layout.capacity * copies)
        return most, most
    by_tile = zip((by_query, by_key), met_tiles, strict=True)
    return _counted(*(make(operands, tile) for make, tile in by_tile))


def _counted(*listings: Listing) -> Any:
    return tuple(map(_walked, listings))


def _walked(listing: Listing) -> cost.Walked:
    """Every listed block is computed, and of blocks smaller than a tile the rest of the tile."""
    own, met, grid, lists = listing.own, listing.met, listing.grid, listing.lists
    lengths = np.asarray(lists.stops, np.int64) - np.asarray(lists.starts)
    items = int(lengths.sum()) * grid.copies
    waste = own.room * met.room / (own.block * met.block)
    of_rows = np.bincount(np.asarray(lists.rows), lengths, grid.rows // grid.copies)
    heads = of_rows.astype(np.int64).reshape(grid.list_batch, -1, grid.own_blocks)
    widest = int(heads.max(1).sum()) * heads.shape[1] * grid.copies
    return cost.Walked(
        TileSizes(1, 1),
        round(items * waste),
        True,
        1,
        items,
        gpu_pieces.balance(lengths, grid.copies * own.parts),
        gpu_pieces.CORES,
        widest / items if items else 1.0,
    )


def _listing(listed, own: Tile, met: Tile, operands: Operands) -> Listing:
    rule, grid = rule_of(listed.mask), RaggedGrid.of(listed, operands)
    make = _static_lists if listed.is_static else _lists
    lists, pieces, shown = make(listed, grid, own.parts, isinstance(rule, str))
    tables = np.zeros(1, np.int32)
    if isinstance(rule, Rule) and rule.rows:
        tables = rule.tables.reshape(-1)
    lists = lists._replace(tables=tables)
    return Listing(listed, grid, lists, pieces.first, pieces.most, rule, own, met, shown)


def _lists(listed, grid: RaggedGrid, parts: int, has_masks: bool) -> tuple[Lists, Pieces, Any]:
    xp = namespace(listed.row_starts)
    make = ragged_grid.items_by_key if grid.is_kv_major else ragged_grid.items_by_query
    items = make(listed, grid)
    order, partial = partial_first(items.row_starts, items.is_partial)
    shown, numbers = None, xp.zeros(order.shape[0], xp.int32)
    if has_masks:
        blocks = listed.block_q, listed.block_kv
        shown, numbers = mask_tiles(listed.mask, items, grid, blocks, keys_first=grid.is_kv_major)
    middles = (items.row_starts[:-1] + partial).astype(xp.int32)
    pieces = _pieces(items.row_starts, middles, grid, parts, order.shape[0])
    turns = gpu_pieces.launched(pieces)
    rows, starts, stops, middles = (x[turns] for x in pieces[:4])
    numbers = numbers[order].astype(xp.int32)
    lists = Lists(turns, rows, starts, stops, middles, items.number[order], numbers, None)
    return Lists(*(None if x is None else _some(xp, x) for x in lists)), pieces, shown


def _pieces(starts, middles, grid: RaggedGrid, parts: int, capacity: int) -> Pieces:
    """Rows of keys are cut where cores would wait for the longest; those of queries never are."""
    rows, repeats = gpu_pieces.whole(starts, middles), grid.copies * parts
    if not grid.is_kv_major:
        return rows
    if namespace(starts) is np:
        lengths = -np.sort(-np.diff(starts))
        if gpu_pieces.balance(lengths, repeats) <= gpu_pieces.EVEN:
            return rows
    length, longest = gpu_pieces.length_of(capacity, repeats), grid.met_blocks * grid.group
    if longest <= length:
        return rows
    return gpu_pieces.cut(starts, middles, length, capacity, longest)


# Cached: forward and backward, and every layer, ask for the same ones.
@functools.lru_cache(maxsize=64)
def _static_lists(
    listed, grid: RaggedGrid, parts: int, has_masks: bool
) -> tuple[Lists, Pieces, Any]:
    with _no_named_device():
        return _lists(listed, grid, parts, has_masks)


def _no_named_device():
    """Masks are asked here and now, on a device that is there: the named one may be on paper."""
    return jax.default_device(None)


def _some(xp, x):
    """At least one entry, so that an empty list can be an array."""
    return x if x.shape[0] else xp.zeros(1, x.dtype)


def arrays(lists: Lists) -> Lists:
    """The same as arrays of JAX."""
    return Lists(*(jnp.asarray(x) for x in lists))
