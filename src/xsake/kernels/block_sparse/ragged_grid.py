"""How block numbers, rows and copies of a list belong together; the arithmetic of a ragged grid.

Blocks are numbered through: (batch, head, block), the block fastest. A list that several batch
elements or heads share is walked once for each of these copies, and its numbers shift with them.
"""

import dataclasses

from jax import lax

from xsake.kernels.block_sparse.problem import Operands
from xsake.kernels.block_sparse.work_list import Items
from xsake.layout import BlockLayout, TransposedLayout
from xsake.layout.ragged import namespace, row_of_item, starts_of


@dataclasses.dataclass(frozen=True)
class RaggedGrid:
    """The sizes of a call, and of the list that is walked for it.

    Args:
        is_kv_major: rows are kv blocks and meet query blocks; else it is the other way round.
        batch, q_heads, kv_heads, q_blocks, kv_blocks: of the call.
        list_batch, list_heads: of the list: 1 where it is shared.
    """

    is_kv_major: bool
    batch: int
    q_heads: int
    kv_heads: int
    q_blocks: int
    kv_blocks: int
    list_batch: int
    list_heads: int

    @classmethod
    def of(cls, listed: BlockLayout | TransposedLayout, operands: Operands) -> "RaggedGrid":
        """The sizes of a call that walks a list.

        Args:
            listed: the list; a transposed one has rows of kv blocks.
            operands: the call.
        """
        return cls(
            isinstance(listed, TransposedLayout),
            operands.q.shape[0],
            operands.q.shape[2],
            operands.k.shape[2],
            listed.q_blocks,
            listed.kv_blocks,
            listed.batch,
            listed.heads,
        )

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.q_heads // self.kv_heads

    @property
    def own_heads(self) -> int:
        return self.kv_heads if self.is_kv_major else self.q_heads

    @property
    def own_blocks(self) -> int:
        return self.kv_blocks if self.is_kv_major else self.q_blocks

    @property
    def met_blocks(self) -> int:
        return self.q_blocks if self.is_kv_major else self.kv_blocks

    @property
    def met_heads(self) -> int:
        return self.q_heads if self.is_kv_major else self.kv_heads

    @property
    def head_copies(self) -> int:
        """Heads that share a list."""
        return self.own_heads // self.list_heads

    @property
    def copies(self) -> int:
        """How often the list is walked."""
        return self.batch // self.list_batch * self.head_copies

    @property
    def rows(self) -> int:
        """Rows of the call: blocks that own results."""
        return self.batch * self.own_heads * self.own_blocks

    def own_number(self, row, copy):
        """The block that a row of the list stands for in a copy."""
        batch, head = quotient(copy, self.head_copies), remainder(copy, self.head_copies)
        shift = batch * self.own_heads * self.own_blocks + head * self.own_blocks
        # A row is (plane, block); between planes lie the blocks of the other heads of the copy.
        plane = quotient(row, self.own_blocks) if self.head_copies > 1 else 0
        return row + plane * (self.head_copies - 1) * self.own_blocks + shift

    def met_shift(self, copy):
        """What a copy adds to the numbers of a list."""
        batch, head = quotient(copy, self.head_copies), remainder(copy, self.head_copies)
        head = head * self.group if self.is_kv_major else quotient(head, self.group)
        return batch * self.met_heads * self.met_blocks + head * self.met_blocks

    def q_and_kv(self, own, met):
        """Numbers of a row's own block and of one it met, as (query block, kv block)."""
        return (met, own) if self.is_kv_major else (own, met)

    def q_head(self, q_number):
        return remainder(quotient(q_number, self.q_blocks), self.q_heads)


def quotient(x, by: int):
    """`x // by` for x >= 0; a shift where it can be, for scalar units that divide slowly."""
    if by == 1:
        return x
    # `//` would look at signs, and that cannot be lowered for a TPU that is not there.
    return x >> (by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(x, by)


def remainder(x, by: int):
    """`x % by` for x >= 0."""
    if by == 1:
        return 0
    return x & (by - 1) if by & (by - 1) == 0 else x - quotient(x, by) * by


def items_by_query(layout: BlockLayout, grid: RaggedGrid) -> Items:
    """The list of query blocks: what they meet is numbered among the kv blocks of the list."""
    xp = namespace(layout.row_starts)
    row = row_of_item(xp, layout.row_starts, layout.capacity)
    plane = xp.minimum(row, layout.rows - 1) // layout.q_blocks
    batch, head = plane // layout.heads, plane % layout.heads
    # With one list per query head, heads of a group meet the same kv head.
    head = head * grid.kv_heads // layout.heads if layout.heads > 1 else head
    column = xp.clip(layout.kv_block, 0, layout.kv_blocks - 1)  # nobody checks a traced list
    number = (batch * grid.kv_heads + head) * layout.kv_blocks + column
    return Items(layout.row_starts, number.astype(xp.int32), layout.is_partial)


def items_by_key(layout: TransposedLayout, grid: RaggedGrid) -> Items:
    """The list of kv blocks; a list that query heads share is written out for each of them."""
    xp = namespace(layout.row_starts)
    repeats = grid.group // layout.group
    row = row_of_item(xp, layout.row_starts, layout.capacity)
    plane = xp.minimum(row, layout.rows - 1) // layout.kv_blocks
    batch, head = plane // layout.heads, plane % layout.heads
    member = xp.clip(layout.q_head, 0, grid.group - 1)
    column = xp.clip(layout.q_block, 0, layout.q_blocks - 1)
    number = (batch * grid.q_heads + head * grid.group + member) * layout.q_blocks + column
    number = number[:, None] + xp.arange(repeats, dtype=xp.int32)[None] * layout.q_blocks
    starts = starts_of(xp, (layout.row_starts[1:] - layout.row_starts[:-1]) * repeats)
    partial = xp.repeat(layout.is_partial, repeats)
    return Items(starts, number.reshape(-1).astype(xp.int32), partial)
