"""The lists that GPU kernels walk for a call, and what walking them costs; launches nothing."""

import dataclasses
import functools
import heapq
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from xsake.kernels.block_sparse import cost, ragged_grid
from xsake.kernels.block_sparse.mask_tiles import mask_tiles
from xsake.kernels.block_sparse.problem import Operands, TileSizes
from xsake.kernels.block_sparse.ragged_grid import RaggedGrid
from xsake.kernels.block_sparse.rule import Rule
from xsake.kernels.block_sparse.split import split_rule
from xsake.kernels.block_sparse.walk import partial_first
from xsake.kernels.block_sparse.work_list import Items
from xsake.layout.ragged import namespace

# Tensor cores take 64 rows of the side that owns results: 16 for each of four warps.
OWN_TILE = 64
# Multiprocessors of an H100, for which the balance of the work is told.
CORES = 132
# Elementwise steps of rules that Mosaic GPU 0.12 cannot lower, or only for signed numbers.
_MISSING = ("population_count", "clz")


class Lists(NamedTuple):
    """What a kernel reads of a list, from global memory, one number at a time."""

    order: Any  # int32 [R]: rows, longest first
    starts: Any  # int32 [R + 1]: first item of a row
    middles: Any  # int32 [R]: its first item without an element mask
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
        rule: the mask's formula, the reason why it has none, or None if there is no mask.
        own, met: tiles of the side that owns results, and of the other one.
        shown: element masks of blocks, [..., block_q, block_kv]; None unless the rule needs them.
    """

    listed: Any
    grid: RaggedGrid
    lists: Lists
    rule: Rule | str | None
    own: Tile
    met: Tile
    shown: Any

    @property
    def programs(self) -> int:
        """Thread blocks: one for each tile of a row."""
        return self.grid.rows * self.own.parts

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
    own, met, grid = listing.own, listing.met, listing.grid
    lengths = np.diff(np.asarray(listing.lists.starts)).astype(np.int64)
    items = int(lengths.sum()) * grid.copies
    waste = own.room * met.room / (own.block * met.block)
    heads = lengths.reshape(grid.list_batch, -1, grid.own_blocks)
    widest = int(heads.max(1).sum()) * heads.shape[1] * grid.copies
    return cost.Walked(
        TileSizes(1, 1),
        round(items * waste),
        True,
        1,
        items,
        _balance(lengths[np.asarray(listing.lists.order)], grid.copies * own.parts),
        CORES,
        widest / items if items else 1.0,
    )


def _balance(lengths: np.ndarray, repeats: int) -> float:
    """Work of the busiest core over the mean, if each core takes the next row when it is free.

    A row costs its items and, for what it begins and ends with, as much as one more.
    """
    cores = [0] * CORES
    for length in lengths.tolist():
        for _ in range(repeats):
            heapq.heapreplace(cores, cores[0] + length + 1)
    return max(cores) * CORES / sum(cores)


def _listing(listed, own: Tile, met: Tile, operands: Operands) -> Listing:
    rule, grid = rule_of(listed.mask), RaggedGrid.of(listed, operands)
    make = _static_lists if listed.is_static else _lists
    lists, shown = make(listed, grid, isinstance(rule, str))
    tables = np.zeros(1, np.int32)
    if isinstance(rule, Rule) and rule.rows:
        tables = rule.tables.reshape(-1)
    return Listing(listed, grid, lists._replace(tables=tables), rule, own, met, shown)


def _lists(listed, grid: RaggedGrid, has_masks: bool) -> tuple[Lists, Any]:
    xp = namespace(listed.row_starts)
    make = ragged_grid.items_by_key if grid.is_kv_major else ragged_grid.items_by_query
    items = make(listed, grid)
    order, partial = partial_first(items.row_starts, items.is_partial)
    counts = items.row_starts[1:] - items.row_starts[:-1]
    # Thread blocks start in this order, so the longest rows never start last.
    rows = xp.argsort(-counts, stable=True).astype(xp.int32)
    shown, numbers = None, xp.zeros(order.shape[0], xp.int32)
    if has_masks:
        blocks = listed.block_q, listed.block_kv
        shown, numbers = mask_tiles(listed.mask, items, grid, blocks, keys_first=grid.is_kv_major)
    found = Items(items.row_starts, items.number[order], items.is_partial)
    middles = (found.row_starts[:-1] + partial).astype(xp.int32)
    numbers = numbers[order].astype(xp.int32)
    lists = Lists(rows, found.row_starts, middles, found.number, numbers, None)
    return Lists(*(None if x is None else _some(xp, x) for x in lists)), shown


# Cached: forward and backward, and every layer, ask for the same ones.
@functools.lru_cache(maxsize=64)
def _static_lists(listed, grid: RaggedGrid, has_masks: bool) -> tuple[Lists, Any]:
    with _no_named_device():
        return _lists(listed, grid, has_masks)


def _no_named_device():
    """Masks are asked here and now, on a device that is there: the named one may be on paper."""
    return jax.default_device(None)


def _some(xp, x):
    """At least one entry, so that an empty list can be an array."""
    return x if x.shape[0] else xp.zeros(1, x.dtype)


def arrays(lists: Lists) -> Lists:
    """The same as arrays of JAX."""
    return Lists(*(jnp.asarray(x) for x in lists))
