"""Layout statistics: density, head balance, padding overhead."""

import dataclasses

import numpy as np

from xsake.layout.csr import Items, used_items
from xsake.layout.grid import BlockGrid


@dataclasses.dataclass(frozen=True)
class LayoutStats:
    """Block counts over all heads and batch elements of a layout.

    Attributes:
        items: computed blocks; full: without an element mask; partial: with one.
        visible_blocks: blocks on or below the diagonal if the layout is causal, else all blocks.
        is_causal: whether no listed block lies above the diagonal.
        budget: density, items / visible_blocks.
        head_items, head_budgets: the same for each head of the layout.
        longest_row, mean_row: kv blocks per query block.
        empty_rows: query blocks without kv blocks.
        imbalance: max / mean items of a head; 1 is even.
        padding_waste: blocks with all rows padded to the longest / items; 1 means none.
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


def compute_stats(items: Items, grid: BlockGrid) -> LayoutStats:
    """Return statistics of NumPy items."""
    row, kv_block, is_partial = used_items(items)
    listed, lengths = row.size, np.diff(items.row_starts)
    spans = grid.spans(np, grid.row_to_q_block(row), kv_block)
    is_causal = not (spans.kv_first > spans.q_last).any()
    per_head = lengths.reshape(grid.batch, grid.heads, -1).sum(axis=(0, 2), dtype=np.int64)
    plane = _causal_blocks(grid) if is_causal else grid.q_blocks * grid.kv_blocks
    visible = plane * grid.batch * grid.heads
    partial = int(np.count_nonzero(is_partial))
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
    """Return the number of blocks of a plane with a pair kv position <= q position."""
    q_block = np.arange(grid.q_blocks, dtype=np.int64)
    last = np.minimum((q_block + 1) * grid.block_q, grid.q_tokens) - 1
    return int(np.minimum(last // grid.block_kv + 1, grid.kv_blocks).sum())
