"""Mask drawing: ASCII for terminals, PNG by matplotlib."""

import math
import os
import textwrap
from typing import Any

import numpy as np
from jaxtyping import Int8

from xsake.errors import ArgumentError, MissingExtraError
from xsake.masks.algebra import AbstractCombination, Not, PerHead
from xsake.masks.array_masks import Explicit, Segments
from xsake.masks.base import AbstractMask, resolve_coverage
from xsake.masks.coverage import UNBOUNDED, Rectangles
from xsake.masks.patterns import BigBird, Chunked, Longformer, Random, Sinks, Strided, Window

SYMBOLS = np.array([".", "+", "#"])  # indexed by Coverage code
PAPER, INK, TEXT = "#eceae4", "#1f4e79", "#333333"
PNG_CELLS = 512
GRID_TOKENS = 40  # grid lines are drawn up to this number of tokens
MAX_PANELS = 64


def ascii_picture(
    mask: AbstractMask, q_tokens: int, kv_tokens: int | None, width: int, head: int | None
) -> str:
    """See `AbstractMask.to_ascii`."""
    kv_tokens = _check_sizes(q_tokens, kv_tokens)
    panels = _panels(mask, head)
    rows, columns = ascii_shape(width)
    pictures = []
    for name, panel in panels:
        cells = coverage_cells(panel, q_tokens, kv_tokens, rows=rows, columns=columns)
        pictures += [name, ascii_cells(cells)] if len(panels) > 1 else [ascii_cells(cells)]
    return "\n".join(pictures)


def ascii_shape(width: int) -> tuple[int, int]:
    """Return the maximum lines and characters per line of a picture."""
    if width < 2:
        raise ArgumentError("`width` is too small for a picture", got=width, expected=">= 2")
    return width // 2, width


def ascii_cells(cells: Int8[np.ndarray, "rows columns"]) -> str:
    """Return a picture of codes 0 `.`, 1 `+` and 2 `#`."""
    return "\n".join("".join(SYMBOLS[row]) for row in cells)


def summary(mask: AbstractMask) -> str:
    """Return the text of `print(mask)`: the repr and a small picture."""
    tokens = min(_num_tokens(mask), UNBOUNDED)
    head = None if mask.heads is None else 0
    picture = ascii_picture(mask, tokens, tokens, 32, head)
    of_head = "" if mask.heads is None else f", head 0 of {mask.heads}"
    note = f"queries 0..{tokens - 1} down, keys 0..{tokens - 1} across{of_head}"
    return f"{mask!r}\n{picture}\n{note}; # all, + some, . none"


def _num_tokens(mask: AbstractMask) -> int:
    """Return the number of tokens to draw so that the pattern is visible."""
    match mask:
        case AbstractCombination(parts=parts) | PerHead(members=parts):
            return max(map(_num_tokens, parts))
        case Not(part=part):
            return _num_tokens(part)
        case Window(left=left, right=right):
            return max(16, 4 * max(left or 0, right or 0))
        case Chunked(size=size):
            return 4 * size
        case Sinks(count=size) | Strided(stride=size):
            return max(16, 4 * size)
        case Longformer(window=window, global_tokens=size):
            return max(16, 4 * window, 4 * size)
        case Random(cell=cell):
            return 16 * cell
        case BigBird(window=window, global_tokens=size, cell=cell):
            return max(4 * window, 4 * size, 16 * cell)
        case Segments() | Explicit():
            return max(1, *(size for array in mask._arrays() for size in array.shape[-2:]))
    return 16


def coverage_cells(
    mask: AbstractMask, q_tokens: int, kv_tokens: int, *, rows: int, columns: int
) -> Int8[np.ndarray, "rows columns"]:
    """Return exact `Coverage` codes of a grid of at most `rows` x `columns` equal cells."""
    q_first, q_last = (ends[:, None] for ends in _cells(q_tokens, rows))
    return resolve_coverage(mask, Rectangles(q_first, q_last, *_cells(kv_tokens, columns)))


def _cells(tokens: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last token of each of at most `limit` cells."""
    size = math.ceil(tokens / limit)
    first = np.arange(0, tokens, size)
    return first, np.minimum(first + size, tokens) - 1


def _check_sizes(q_tokens: int, kv_tokens: int | None) -> int:
    kv_tokens = q_tokens if kv_tokens is None else kv_tokens
    if min(q_tokens, kv_tokens) < 1:
        raise ArgumentError(
            "cannot draw zero tokens", got=f"{q_tokens=}, {kv_tokens=}", expected=">= 1"
        )
    return kv_tokens


def _panels(mask: AbstractMask, head: int | None) -> list[tuple[str, AbstractMask]]:
    """Return captions and masks of the heads to draw."""
    if head is not None:
        mask._check_head(head)
        return [(f"head {head}", mask.for_head(head))]
    if mask.heads is None:
        return [("", mask)]
    return [(f"head {index}", mask.for_head(index)) for index in range(mask.heads)]


def draw_png(
    mask: AbstractMask,
    path: str | os.PathLike[str],
    q_tokens: int,
    kv_tokens: int | None,
    head: int | None,
) -> None:
    """See `AbstractMask.draw`."""
    kv_tokens = _check_sizes(q_tokens, kv_tokens)
    panels = _panels(mask, head)
    if len(panels) > MAX_PANELS:
        raise ArgumentError(
            "too many heads for one picture",
            got=len(panels),
            expected=f"at most {MAX_PANELS}",
            fix="pass head=...",
        )
    side = 6.0 if len(panels) == 1 else 3.0
    size = side, side * min(2.0, max(0.5, q_tokens / kv_tokens))
    labels = "query position", "key position"
    figure, grid, columns = panel_figure(len(panels), size, 0.9, labels, color=TEXT)
    for (name, panel), axes in zip(panels, grid, strict=True):
        _draw_panel(axes, panel, (q_tokens, kv_tokens), ticks=9 if len(panels) == 1 else 5)
        axes.set_title(name, fontsize=9, color=TEXT)
    title = textwrap.fill(textwrap.shorten(repr(mask), 240), max(48, 28 * columns))
    figure.suptitle(title, fontsize=11, family="monospace", color=TEXT)
    figure.savefig(path, format="png", dpi=150)


def panel_figure(
    num_panels: int,
    size: tuple[float, float],
    title_height: float,
    labels: tuple[str, str],
    **label_style: Any,
) -> tuple[Any, list[Any], int]:
    """Return a figure, its panels of `size` inches in a square grid, and the number of columns.

    The labels of the vertical and the horizontal axis are on the outer panels.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "drawing a PNG needs matplotlib", fix="pip install xsake[viz]"
        ) from error
    columns = math.ceil(math.sqrt(num_panels))
    rows = math.ceil(num_panels / columns)
    figsize = size[0] * columns + 0.6, size[1] * rows + title_height
    figure = Figure(figsize=figsize, layout="constrained", facecolor="white")
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(num_panels)]
    for axes in panels[::columns]:
        axes.set_ylabel(labels[0], **label_style)
    for axes in panels[-columns:]:
        axes.set_xlabel(labels[1], **label_style)
    return figure, panels, columns


def _draw_panel(axes: Any, mask: AbstractMask, tokens: tuple[int, int], *, ticks: int) -> None:
    """Draw one head; the colour interpolates from PAPER (none allowed) to INK (all allowed)."""
    from matplotlib.colors import LinearSegmentedColormap

    q_tokens, kv_tokens = tokens
    axes.imshow(
        coverage_cells(mask, q_tokens, kv_tokens, rows=PNG_CELLS, columns=PNG_CELLS) / 2.0,
        cmap=LinearSegmentedColormap.from_list("mask", [PAPER, INK]),
        vmin=0.0,
        vmax=1.0,
        interpolation="nearest",
        # Positions are cell centres; query 0 is at the top.
        extent=(-0.5, kv_tokens - 0.5, q_tokens - 0.5, -0.5),
        aspect="equal" if 0.5 <= q_tokens / kv_tokens <= 2 else "auto",
    )
    axes.set_xticks(_ticks(kv_tokens, ticks))
    axes.set_yticks(_ticks(q_tokens, ticks))
    axes.tick_params(labelsize=8, colors=TEXT, length=3)
    if max(q_tokens, kv_tokens) <= GRID_TOKENS:
        axes.set_xticks(np.arange(kv_tokens + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(q_tokens + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.8)
        axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _ticks(tokens: int, limit: int) -> list[int]:
    """Return at most `limit` tick positions from 0, a power of two apart."""
    step = 1
    while step * limit < tokens:
        step *= 2
    return list(range(0, tokens, step))
