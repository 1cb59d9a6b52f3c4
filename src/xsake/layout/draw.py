"""Layout drawing: ASCII for terminals, PNG by matplotlib."""

import os

import numpy as np

from xsake.errors import ArgumentError
from xsake.layout.csr import Items
from xsake.layout.grid import BlockGrid, count_blocks
from xsake.masks.coverage import ALL, NONE, SOME
from xsake.masks.draw import PNG_CELLS, ascii_cells, ascii_shape
from xsake.reports.plots import MAX_PANELS, draw_cells


def ascii_plane(items: Items, grid: BlockGrid, *, batch: int, head: int, width: int) -> str:
    """Draw one head: `#` full, `+` partial (or mixed in merged cells), `.` skipped."""
    return ascii_cells(plane_cells(items, grid, (batch, head), ascii_shape(width)))


def plane_cells(
    items: Items, grid: BlockGrid, which: tuple[int, int], max_shape: tuple[int, int]
) -> np.ndarray:
    """Return codes of one plane (batch, head), merged into at most `max_shape` cells."""
    batch, head = which
    if not (0 <= batch < grid.batch and 0 <= head < grid.heads):
        raise ArgumentError(
            "draw-index",
            "batch or head index out of range",
            got=f"{batch=}, {head=}",
            expected=f"batch below {grid.batch}, head below {grid.heads}",
        )
    tall, wide = map(count_blocks, (grid.q_blocks, grid.kv_blocks), max_shape)
    shape = count_blocks(grid.q_blocks, tall), count_blocks(grid.kv_blocks, wide)
    first = (batch * grid.heads + head) * grid.q_blocks
    starts = items.row_starts[first : first + grid.q_blocks + 1]
    part = slice(int(starts[0]), int(starts[-1]))
    q_block = np.repeat(np.arange(grid.q_blocks), np.diff(starts))
    cell = (q_block // tall) * shape[1] + items.kv_block[part] // wide
    listed = np.bincount(cell, minlength=shape[0] * shape[1])
    full = np.bincount(cell[~items.is_partial[part]], minlength=shape[0] * shape[1])
    height = np.minimum(tall, grid.q_blocks - np.arange(shape[0]) * tall)
    width = np.minimum(wide, grid.kv_blocks - np.arange(shape[1]) * wide)
    existing = (height[:, None] * width[None, :]).reshape(-1)
    codes = np.where(listed == 0, NONE, np.where(full == existing, ALL, SOME))
    return codes.reshape(shape)


def draw_png(
    items: Items,
    grid: BlockGrid,
    path: str | os.PathLike[str],
    *,
    title: str,
    head: int | None,
    batch: int,
) -> None:
    """Write one panel per head (at most `MAX_PANELS`), or the selected head, to a PNG file."""
    heads = range(min(grid.heads, MAX_PANELS)) if head is None else [head]
    if head is None and grid.heads > MAX_PANELS:
        title += f"; the first {MAX_PANELS} of {grid.heads} heads"
    panels = []
    for index in heads:
        cells = plane_cells(items, grid, (batch, index), (PNG_CELLS, PNG_CELLS))
        first = (batch * grid.heads + index) * grid.q_blocks
        listed = int(items.row_starts[first + grid.q_blocks] - items.row_starts[first])
        panels.append((f"head {index}: {listed:,} blocks" if grid.heads > 1 else "", cells))
    draw_cells(
        path,
        panels,
        title=title,
        size=(grid.q_blocks, grid.kv_blocks),
        labels=(f"query block of {grid.block_q} tokens", f"kv block of {grid.block_kv} tokens"),
        names=("skipped", "partial", "full"),
    )
