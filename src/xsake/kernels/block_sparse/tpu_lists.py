"""The lists that TPU kernels walk for a call, and what walking them costs; launches nothing."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from xsake.kernels.block_sparse import cost, ragged_grid, work_list
from xsake.kernels.block_sparse.mask_tiles import mask_tiles
from xsake.kernels.block_sparse.problem import Operands, Problem, TileSizes
from xsake.kernels.block_sparse.ragged_grid import RaggedGrid
from xsake.kernels.block_sparse.rule import Rule
from xsake.kernels.block_sparse.split import split_rule
from xsake.kernels.block_sparse.work_list import Items, WorkList

# Scalar memory is 1 MiB on every TPU; libtpu 0.0.50.1 accepts lists of 245,760 words, not 262,144.
MOST_WORDS = 240_000
# Two cores share a launch on v4 and v5p; elsewhere the two parts run one after the other.
PARTS = 2
# What a group takes: less, and its fixed cost shows; more, and short rows are padded, code grows.
GROUP_TOKENS, MOST_SLOTS = 512, 4


@dataclasses.dataclass(frozen=True, eq=False)
class Listing:
    """A list and how it is walked.

    Args:
        listed: the layout, or its transpose.
        grid: what the list's numbers mean.
        work: the list, packed and cut.
        rule: the mask's formula, the reason why it has none, or None if there is no mask.
    """

    listed: Any
    grid: RaggedGrid
    work: WorkList
    rule: Rule | str | None

    def turns(self, launch: int):
        """Rows of the longest part of a launch: an int if the list is static."""
        turns = self.work.turns[launch]
        return int(turns) if self.listed.is_static else turns

    def element_masks(self, keys_first: bool):
        """`(tiles or None, the tile of each slot by launch)`, for rules without a formula."""
        if not isinstance(self.rule, str):
            return None, np.zeros((self.work.cut.launches, 1), np.int32)
        tiles, number = _static_tiles(self.listed, self.grid, keys_first)
        return tiles, number[self.work.items] if number.size else self.work.items

    @property
    def tables(self) -> np.ndarray:
        """The rule's integers of every head, flat; one at least."""
        if isinstance(self.rule, Rule) and self.rule.rows:
            return self.rule.tables.reshape(-1)
        return np.zeros(1, np.int32)


def by_query(operands: Operands, problem: Problem) -> Listing:
    """Rows are query blocks."""
    layout = operands.layout
    return _listing(layout, slots_of(problem, layout.block_kv, layout.kv_blocks), operands)


def by_key(operands: Operands, problem: Problem) -> Listing:
    """Rows are kv blocks, items the query blocks that see them."""
    layout = operands.layout
    transposed = layout.transpose(operands.k.shape[2], operands.q.shape[2])
    return _listing(transposed, slots_of(problem, layout.block_q, layout.q_blocks), operands)


def walked(operands: Operands, problem: Problem) -> tuple[cost.Walked, cost.Walked]:
    """What walking costs, by query and by key."""
    layout = operands.layout
    if layout.is_static:
        return _counted(by_query(operands, problem)), _counted(by_key(operands, problem))
    heads = operands.k.shape[2], operands.q.shape[2]
    transposed = jax.eval_shape(lambda layout: layout.transpose(*heads), layout)
    return (
        _bounded(layout, slots_of(problem, layout.block_kv, layout.kv_blocks), operands),
        _bounded(transposed, slots_of(problem, layout.block_q, layout.q_blocks), operands),
    )


def too_many_blocks(operands: Operands) -> bool:
    """Whether there are more blocks than a word can tell apart."""
    (batch, q_tokens, q_heads, _), (kv_tokens, kv_heads) = operands.q.shape, operands.k.shape[1:3]
    layout = operands.layout
    most = max(q_heads * q_tokens // layout.block_q, kv_heads * kv_tokens // layout.block_kv)
    return batch * (most + q_heads) > work_list.MOST_BLOCKS


def slots_of(problem: Problem, block: int, blocks: int) -> int:
    """Items of a group when it meets blocks of `block` tokens."""
    if problem.tiles is not None:
        return problem.tiles.blocks
    return max(1, min(GROUP_TOKENS // block, MOST_SLOTS, blocks))


def _rule(listed) -> Rule | str | None:
    return None if listed.mask is None else split_rule(listed.mask)


def _most_words(rule: Rule | str | None) -> int:
    """Where element masks come as tiles, their numbers take as much room as the words."""
    return MOST_WORDS // 2 if isinstance(rule, str) else MOST_WORDS


def _listing(listed, slots: int, operands: Operands) -> Listing:
    rule, grid = _rule(listed), RaggedGrid.of(listed, operands)
    make = _static_list if listed.is_static else _list
    return Listing(listed, grid, make(listed, grid, slots, PARTS, _most_words(rule)), rule)


def _list(listed, grid: RaggedGrid, slots: int, parts: int, most_words: int) -> WorkList:
    return work_list.build(_items(listed, grid), slots, parts, most_words, _longest(grid))


# Static lists are cached: forward and backward, and every layer, ask for the same ones.
_static_list = functools.lru_cache(maxsize=64)(_list)


def _longest(grid: RaggedGrid) -> int:
    """The most items that a row can have."""
    return grid.met_blocks * (grid.group if grid.is_kv_major else 1)


def _items(listed, grid: RaggedGrid) -> Items:
    make = ragged_grid.items_by_key if grid.is_kv_major else ragged_grid.items_by_query
    return make(listed, grid)


@functools.lru_cache(maxsize=16)
def _static_tiles(listed, grid: RaggedGrid, keys_first: bool):
    """Element masks of a static list's partial blocks."""
    blocks = listed.block_q, listed.block_kv
    return mask_tiles(listed.mask, _items(listed, grid), grid, blocks, keys_first)


def _counted(listing: Listing) -> cost.Walked:
    cut, work = listing.work.cut, listing.work
    borders = np.take_along_axis(work.starts, work.bounds - work.bounds[:, :1], 1)
    parts = np.diff(borders, axis=1)
    total, busiest = int(parts.sum()), int(parts.max(1).sum())
    groups = total * listing.grid.copies
    tiles = TileSizes(1, cut.slots)
    balance = busiest * cut.parts / total if total else 1.0
    return cost.Walked(tiles, groups * cut.slots, True, cut.launches, groups, balance)


def _bounded(listed, slots: int, operands: Operands) -> cost.Walked:
    """The same of a list whose items are not known."""
    grid = RaggedGrid.of(listed, operands)
    capacity = listed.capacity * (grid.group // listed.group if grid.is_kv_major else 1)
    groups = work_list.traced_groups(listed.rows, capacity, slots)
    cut = work_list.cut_of(
        listed.rows, groups, _longest(grid), slots, PARTS, _most_words(_rule(listed))
    )
    return cost.Walked(TileSizes(1, slots), None, True, cut.launches, groups * grid.copies)
