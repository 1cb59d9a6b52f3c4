"""Counts what a layout asks for: budget, balance between heads, what padding would waste."""

import dataclasses

import numpy as np

from xsake.layout.grid import BlockGrid
from xsake.layout.ragged import Items, row_of_item


@dataclasses.dataclass(frozen=True)
class LayoutStats:
    """What a layout costs; blocks are counted over all its heads and batch elements.

    Attributes:
        items: blocks computed; full: those without a token rule; partial: the others.
        visible_blocks: blocks that touch or lie below the diagonal if no listed block lies above
            it, else all blocks.
        is_causal: which of the two it was.
        budget: items / visible_blocks.
        head_items, head_budgets: the same for each head of the layout.
        longest_row, mean_row: kv blocks per query block.
        empty_rows: query blocks that see nothing.
        imbalance: work of the busiest head / mean work of a head; 1 is even.
        padding_waste: blocks if every row were padded to the longest / items; 1 is no waste.
        nbytes: size of the arrays.
    """

    items: int
    full: int
    partial: int
    visible_blocks: int
    is_causal: bool
    budget: float
    head_items: tuple[int, ...]
    head_budgets: tuple[float, ...]
    longest_row: int
    mean_row: float
    empty_rows: int
    imbalance: float
    padding_waste: float
    nbytes: int

    def __str__(self) -> str:
        scope = "causally visible" if self.is_causal else "all"
        return (
            f"{self.items:,} blocks ({self.full:,} full, {self.partial:,} partial) = "
            f"{self.budget:.1%} of {scope} {self.visible_blocks:,}; "
            f"rows: mean {self.mean_row:.1f}, longest {self.longest_row}, "
            f"{self.empty_rows} empty; imbalance {self.imbalance:.2f}, "
            f"padding waste {self.padding_waste:.2f}, {self.nbytes / 1e6:.2f} MB"
        )


def collect(items: Items, grid: BlockGrid) -> LayoutStats:
    """Statistics of concrete NumPy items."""
    listed = int(items.row_starts[-1])
    lengths = np.diff(items.row_starts)
    row = row_of_item(np, items.row_starts, items.kv_block.size)[:listed]
    spans = grid.spans(np, grid.q_block_of(row), items.kv_block[:listed])
    is_causal = not (spans.kv_first > spans.q_last).any()
    per_head = lengths.reshape(grid.batch, grid.heads, -1).sum(axis=(0, 2), dtype=np.int64)
    plane = _causal_blocks(grid) if is_causal else grid.q_blocks * grid.kv_blocks
    visible = plane * grid.batch * grid.heads
    partial = int(np.count_nonzero(items.is_partial[:listed]))
    longest = int(lengths.max())
    return LayoutStats(
        items=listed,
        full=listed - partial,
        partial=partial,
        visible_blocks=visible,
        is_causal=is_causal,
        budget=listed / visible,
        head_items=tuple(per_head.tolist()),
        head_budgets=tuple((per_head / (plane * grid.batch)).tolist()),
        longest_row=longest,
        mean_row=listed / grid.rows,
        empty_rows=int(np.count_nonzero(lengths == 0)),
        imbalance=float(per_head.max() / per_head.mean()) if listed else 1.0,
        padding_waste=longest * grid.rows / listed if listed else 1.0,
        nbytes=sum(array.nbytes for array in items),
    )


def _causal_blocks(grid: BlockGrid) -> int:
    """Blocks of one plane that hold a pair with kv position <= q position."""
    q_block = np.arange(grid.q_blocks, dtype=np.int64)
    last = np.minimum((q_block + 1) * grid.block_q, grid.q_tokens) - 1
    return int(np.minimum(last // grid.block_kv + 1, grid.kv_blocks).sum())
