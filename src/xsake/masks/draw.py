"""Mask drawing: ASCII for terminals, PNG by matplotlib."""

import math
import os
import textwrap

import numpy as np
from jaxtyping import Int8

from xsake.errors import ArgumentError
from xsake.masks.algebra import AbstractCombination, Not, PerHead
from xsake.masks.array_masks import Explicit, Segments
from xsake.masks.base import AbstractMask, resolve_coverage
from xsake.masks.coverage import UNBOUNDED, Rectangles
from xsake.masks.patterns import BigBird, Chunked, Longformer, Random, Sinks, Strided, Window
from xsake.reports.plots import MAX_PANELS, draw_cells

SYMBOLS = np.array([".", "+", "#"])  # indexed by Coverage code
PNG_CELLS = 512


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
        raise ArgumentError(
            "draw-width", "`width` is too small for a picture", got=width, expected=">= 2"
        )
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
            "draw-tokens",
            "cannot draw zero tokens",
            got=f"{q_tokens=}, {kv_tokens=}",
            expected=">= 1",
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
    size = q_tokens, _check_sizes(q_tokens, kv_tokens)
    panels = _panels(mask, head)
    if len(panels) > MAX_PANELS:
        raise ArgumentError(
            "draw-heads",
            "too many heads for one picture",
            got=len(panels),
            expected=f"at most {MAX_PANELS}",
            fix="pass head=...",
        )
    draw_cells(
        path,
        [(x, coverage_cells(one, *size, rows=PNG_CELLS, columns=PNG_CELLS)) for x, one in panels],
        title=textwrap.shorten(repr(mask), 240),
        size=size,
        labels=("query position", "key position"),
        names=("masked", "some", "allowed"),
        offset=-0.5,  # positions are cell centres
    )
