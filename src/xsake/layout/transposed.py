"""Transposed (kv-major) layout: the query blocks of each kv block."""

import dataclasses

import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from xsake.errors import LayoutError
from xsake.layout.csr import Items, freeze, is_concrete, item_rows, namespace, pad_or_truncate
from xsake.layout.grid import SIZES, BlockCounts, BlockGrid, register_layout
from xsake.masks import AbstractMask

_ARRAYS = ("row_starts", "q_block", "q_head", "is_partial")


@register_layout(leaves=_ARRAYS, static=(*SIZES, "group", "mask"))
@dataclasses.dataclass(frozen=True, eq=False)
class TransposedLayout(BlockCounts):
    """CSR lists of query blocks; row = (b * heads + y) * kv_blocks + j for kv block j of head y.

    Items of a row ascend by (`q_head`, `q_block`). `heads` is 1 (shared) or the number of kv heads.
    `group` is the number of query heads gathered in a row: 1 if the query heads of a kv head share
    a list (then `q_head` is 0), else the query heads per kv head, and `q_head` is the index inside
    the group. Entries from `row_starts[-1]` on are unused and zero.
    """

    row_starts: Int32[Array | np.ndarray, " R1"]
    q_block: Int32[Array | np.ndarray, " W"]
    q_head: Int32[Array | np.ndarray, " W"]
    is_partial: Bool[Array | np.ndarray, " W"]
    q_tokens: int
    kv_tokens: int
    block_q: int
    block_kv: int
    batch: int
    heads: int
    group: int
    mask: AbstractMask | None

    def __post_init__(self):
        if self.is_static:
            freeze(self, _ARRAYS)

    @property
    def rows(self) -> int:
        return self.batch * self.heads * self.kv_blocks

    @property
    def capacity(self) -> int:
        return self.q_block.shape[0]

    @property
    def is_static(self) -> bool:
        return isinstance(self.row_starts, np.ndarray)

    @property
    def items(self) -> int:
        """Number of listed blocks; raises while the layout is traced."""
        if not is_concrete(self.row_starts):
            raise LayoutError(
                "traced-count",
                "the number of items is not available inside jit",
                fix="use capacity, the upper bound, or a static layout",
            )
        return int(self.row_starts[-1])


def transposed_heads(heads: int, kv_heads: int, q_heads: int) -> tuple[int, int]:
    """Return `(heads, group)` of the transpose of a layout with `heads` heads."""
    if kv_heads < 1 or q_heads % kv_heads:
        raise LayoutError(
            "transpose-groups",
            "query heads are not a multiple of kv heads",
            got=f"{q_heads=}, {kv_heads=}",
            expected="q_heads a multiple of kv_heads",
        )
    if heads in (1, kv_heads):
        return heads, 1
    if heads == q_heads:
        return kv_heads, q_heads // kv_heads
    raise LayoutError(
        "transpose-heads",
        "the layout's heads match neither the query heads nor the kv heads",
        got=f"layout heads {heads}, {q_heads=}, {kv_heads=}",
        expected=f"1, {kv_heads} or {q_heads}",
        fix="build the layout with shared lists, one per kv head or one per query head",
    )


def transpose_items(items: Items, grid: BlockGrid, heads: int, group: int) -> tuple:
    """Return the arrays of a `TransposedLayout`.

    NumPy loops over kv heads: less memory, and 16-bit sort keys are fastest.
    """
    planes = grid.batch * heads
    if namespace(*items) is not np or planes == 1:
        return _transpose(namespace(*items), items, grid, heads, group)
    rows = grid.rows // planes
    plane_grid = grid.replace(batch=1, heads=grid.heads // heads)
    parts = []
    for first in range(0, grid.rows, rows):
        bounds = items.row_starts[first : first + rows + 1]
        part = slice(bounds[0], bounds[-1])
        plane = Items(bounds - bounds[0], items.kv_block[part], items.is_partial[part])
        starts, *arrays = _transpose(np, plane, plane_grid, 1, group)
        parts.append((starts[1:] + bounds[0], *arrays))
    ends, *arrays = (np.concatenate(part) for part in zip(*parts, strict=True))
    padded = (pad_or_truncate(np, array, items.kv_block.size) for array in arrays)
    return np.concatenate([np.zeros(1, np.int32), ends]), *padded


def _transpose(xp, items: Items, grid: BlockGrid, heads: int, group: int) -> tuple:
    """Transpose by a stable sort by target row; items are sorted by (batch, head, query block)."""
    capacity = items.kv_block.shape[0]
    rows = grid.batch * heads * grid.kv_blocks
    row = item_rows(xp, items.row_starts, capacity)
    owned = row < grid.rows
    head = grid.row_to_head(row)
    target = (grid.row_to_batch(row) * heads + head // group) * grid.kv_blocks + items.kv_block
    target = xp.where(owned, target, rows)
    if xp is np:
        target = target.astype(np.min_scalar_type(rows))
    order = xp.argsort(target, stable=True)
    edges = xp.arange(rows + 1, dtype=target.dtype)
    row_starts = xp.searchsorted(target[order], edges).astype(xp.int32)
    q_block = xp.where(owned, grid.row_to_q_block(row), 0)[order]
    q_head = xp.where(owned, head % group, 0)[order]
    return row_starts, q_block, q_head, (items.is_partial & owned)[order]
