"""Layout drawing: ASCII for terminals, PNG by matplotlib."""

import math
import os
import textwrap

import numpy as np

from xsake.errors import ArgumentError, MissingExtraError
from xsake.layout.csr import Items
from xsake.layout.grid import BlockGrid

NONE, PARTIAL, FULL = 0, 1, 2
SYMBOLS = np.array([".", "+", "#"])
COLOURS = ("#f3f1ec", "#8fb4d9", "#1f4e79")
LABELS = ("skipped", "partial", "full")
PNG_CELLS = 512
MAX_PANELS = 64


def ascii_plane(items: Items, grid: BlockGrid, *, batch: int, head: int, width: int) -> str:
    """Draw one head: `#` full, `+` partial (or mixed in merged cells), `.` skipped."""
    if width < 2:
        raise ArgumentError("`width` is too small for a picture", got=width, expected=">= 2")
    cells = plane_cells(items, grid, (batch, head), rows=max(1, width // 2), columns=width)
    return "\n".join("".join(SYMBOLS[line]) for line in cells)


def plane_cells(
    items: Items, grid: BlockGrid, which: tuple[int, int], *, rows: int, columns: int
) -> np.ndarray:
    """Return codes of one plane, merged into at most `rows` x `columns` cells."""
    batch, head = which
    if not (0 <= batch < grid.batch and 0 <= head < grid.heads):
        raise ArgumentError(
            "batch or head index out of range",
            got=f"{batch=}, {head=}",
            expected=f"batch below {grid.batch}, head below {grid.heads}",
        )
    tall, wide = math.ceil(grid.q_blocks / rows), math.ceil(grid.kv_blocks / columns)
    shape = math.ceil(grid.q_blocks / tall), math.ceil(grid.kv_blocks / wide)
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
    codes = np.where(listed == 0, NONE, np.where(full == existing, FULL, PARTIAL))
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
    """Write one panel per head, or the selected head, to a PNG file."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.colors import ListedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as missing:
        raise MissingExtraError(
            "drawing a PNG needs matplotlib", fix="pip install xsake[viz]"
        ) from missing
    heads = range(min(grid.heads, MAX_PANELS)) if head is None else [head]
    across = math.ceil(math.sqrt(len(heads)))
    down = math.ceil(len(heads) / across)
    side = 4.6 if len(heads) == 1 else 2.4
    figure = Figure(figsize=(side * across + 0.6, side * down + 1.1), layout="constrained")
    FigureCanvasAgg(figure)
    colours = ListedColormap(COLOURS)
    for panel, index in enumerate(heads):
        axes = figure.add_subplot(down, across, panel + 1)
        cells = plane_cells(items, grid, (batch, index), rows=PNG_CELLS, columns=PNG_CELLS)
        extent = (0, grid.kv_blocks, grid.q_blocks, 0)
        axes.imshow(cells, cmap=colours, vmin=0, vmax=2, extent=extent, interpolation="nearest")
        axes.set_aspect(grid.kv_blocks / grid.q_blocks)
        axes.locator_params(nbins=4, integer=True)
        axes.tick_params(labelsize=7, length=2)
        axes.spines[:].set_visible(False)
        if panel % across == 0:
            axes.set_ylabel(f"query block of {grid.block_q} tokens", fontsize=8)
        if panel + across >= len(heads):
            axes.set_xlabel(f"kv block of {grid.block_kv} tokens", fontsize=8)
        if grid.heads > 1:
            first = (batch * grid.heads + index) * grid.q_blocks
            listed = int(items.row_starts[first + grid.q_blocks] - items.row_starts[first])
            axes.set_title(f"head {index}: {listed:,} blocks", fontsize=8)
    figure.suptitle(textwrap.fill(title, 60 if across < 3 else 100), fontsize=10)
    handles = [
        Patch(facecolor=colour, edgecolor="#bbbbbb", label=label)
        for colour, label in zip(COLOURS, LABELS, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=7, frameon=False)
    figure.savefig(path, format="png", dpi=150)
