"""One look for all pictures: palette, matplotlib style, PNG files and SVG for pages."""

import contextlib
import io
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from xsake.errors import MissingExtraError

# `ours` is XSAKE and what it computes, `peer` another library, `heat` a tint below black text.
LIGHT = {
    "paper": "#fbfaf6", "surface": "#ffffff", "ink": "#1e1b17", "muted": "#665f55",
    "faint": "#8d857a", "line": "#e5dfd4", "blank": "#f3efe7", "heat": "#e8946f",
    "ours": "#ab3619", "peer": "#2b6491",
}  # fmt: skip
DARK = {
    "paper": "#141310", "surface": "#1c1a17", "ink": "#eee9df", "muted": "#aaa295",
    "faint": "#857d70", "line": "#35312a", "blank": "#23201c", "heat": "#8f4424",
    "ours": "#ff9670", "peer": "#7db8ee",
}  # fmt: skip
OURS, PEER, FAINT, INK, MUTED = (LIGHT[name] for name in ("ours", "peer", "faint", "ink", "muted"))
SERIES = (OURS, PEER, "#8a6d1f", "#5f4b8b", "#3f7d58", INK)  # of lines without a meaning
HEAT = (LIGHT["surface"], LIGHT["heat"])
CODES = (LIGHT["blank"], LIGHT["heat"], OURS)  # of coverage: none, some, all
STYLE = {
    "axes.edgecolor": FAINT, "axes.labelcolor": MUTED, "axes.labelsize": 9,
    "axes.prop_cycle": f"cycler(color={list(SERIES)})", "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlecolor": INK, "axes.titlelocation": "left",
    "axes.titlesize": 10, "figure.facecolor": LIGHT["surface"], "figure.titlesize": 11,
    "figure.titleweight": "bold", "grid.color": LIGHT["line"], "legend.fontsize": 8,
    "legend.frameon": False, "legend.title_fontsize": 8, "savefig.dpi": 160,
    "svg.fonttype": "none", "text.color": INK,
    "text.parse_math": False,  # names from files are text, not formulas
    "xtick.color": MUTED, "xtick.labelsize": 8, "ytick.color": MUTED, "ytick.labelsize": 8,
}  # fmt: skip
MAX_PANELS = 64
GRID_CELLS = 40  # grid lines are drawn up to this number of rows and columns


@contextlib.contextmanager
def open_png(
    path: str | os.PathLike[str],
    size: tuple[float, float] | None,
    *,
    title: str = "",
    origin: str = "",
    extra: str = "viz",
) -> Iterator[Any]:
    """Yield a figure of `size` inches; write it to a PNG file with the origin of its numbers."""
    with _new_figure(extra, size) as figure:
        yield figure
        if title:
            figure.suptitle(title, x=0.01, ha="left", wrap=True)
        if origin:
            figure.supxlabel(origin, x=0.99, ha="right", fontsize=6, color=MUTED)
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")


def to_svg(draw: Callable[[Any], None], *, label: str) -> str:
    """Return a figure as an SVG element in the colours of a page; labels of a page differ."""
    buffer = io.BytesIO()
    with _new_figure("viz", changes={"svg.hashsalt": label}) as figure:
        draw(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = ElementTree.fromstring(buffer.getvalue())
    variables = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
    by_name = lambda value: re.sub("#[0-9a-f]{6}", lambda x: variables.get(x[0], x[0]), value)
    for element in svg.iter():  # HTML has no namespaces, and ids are those of the page
        element.tag = element.tag.rpartition("}")[2]
        pairs = element.attrib.items()
        element.attrib = {name.rpartition("}")[2]: by_name(value) for name, value in pairs}
        if element.tag == "g":
            element.attrib.pop("id", None)
    for child in [x for x in svg if x.tag == "metadata" or x.find("style") is not None]:
        svg.remove(child)
    attributes = {"class": "chart", "role": "img", "aria-label": label}
    svg.attrib = attributes | {"viewBox": svg.attrib["viewBox"]}
    return ElementTree.tostring(svg, encoding="unicode")


def draw_cells(
    path: str | os.PathLike[str],
    panels: Sequence[tuple[str, np.ndarray]],
    *,
    title: str,
    size: tuple[int, int],
    labels: tuple[str, str],
    names: tuple[str, str, str],
    offset: float = 0.0,
) -> None:
    """Write grids of codes 0, 1 and 2 to a PNG file, e.g. a mask or a layout of several heads.

    Args:
        path: of the file.
        panels: caption and codes of each grid.
        title: of the picture.
        size: rows and columns of a grid; codes may have fewer, merged.
        labels: of the vertical and the horizontal axis.
        names: of the codes.
        offset: coordinate of the upper left corner.
    """
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    side, ticks = (5.0, 9) if len(panels) == 1 else (2.7, 5)
    high, wide = size
    ratio = min(2.0, max(0.5, high / wide))
    with open_png(path, (side * columns + 0.6, side * ratio * rows + 1.1)) as figure:
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        for index, (caption, codes) in enumerate(panels):
            axes = figure.add_subplot(rows, columns, index + 1)
            axes.imshow(
                codes, cmap=ListedColormap(CODES), vmin=0, vmax=2, interpolation="nearest",
                extent=(offset, wide + offset, high + offset, offset),
                aspect=ratio * wide / high,
            )  # fmt: skip
            axes.set(xticks=_ticks(wide, ticks), yticks=_ticks(high, ticks))
            axes.set_title(caption, fontsize=8)
            axes.spines[:].set_visible(False)
            if index % columns == 0:
                axes.set_ylabel(labels[0])
            if index >= len(panels) - columns:
                axes.set_xlabel(labels[1])
            if max(size) <= GRID_CELLS:
                for axis, count in ((axes.xaxis, wide), (axes.yaxis, high)):
                    axis.set_ticks(np.arange(count + 1) + offset, minor=True)
                    axis.remove_overlapping_locs = False
                axes.grid(which="minor", color=LIGHT["surface"], linewidth=0.8)
                axes.tick_params(which="minor", length=0)
        text = textwrap.fill(title, max(48, 28 * columns))
        figure.suptitle(text, fontsize=9, family="monospace", fontweight="normal")
        keys = [
            Patch(facecolor=colour, edgecolor=FAINT, linewidth=0.5, label=name)
            for colour, name in zip(CODES, names, strict=True)
        ]
        figure.legend(handles=keys, loc="outside lower center", ncols=3)


def draw_heat_map(axes: Any, values: np.ndarray, max_value: float, pattern: str) -> None:
    """Draw a heat map of at least 0 with a number in every cell; NaN leaves a cell empty."""
    from matplotlib.colors import LinearSegmentedColormap

    cmap = LinearSegmentedColormap.from_list("heat", HEAT)
    axes.imshow(values, cmap=cmap, vmin=0, vmax=max_value, aspect="auto")
    for (y, x), value in np.ndenumerate(values):
        text = "" if np.isnan(value) else pattern.format(value)
        axes.text(x, y, text, ha="center", va="center", fontsize=6, in_layout=False)


def format_ticks(axis: Any, pattern: str, *, is_log: bool = False) -> None:
    """Format the ticks of an axis, e.g. by `{:.0%}`; of a logarithmic one at 1, 2 and 5."""
    if is_log:
        from matplotlib.ticker import LogLocator

        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: pattern.format(value))
    axis.set_minor_formatter(lambda *_: "")


@contextlib.contextmanager
def _new_figure(
    extra: str, size: tuple[float, float] | None = None, changes: dict[str, Any] | None = None
) -> Iterator[Any]:
    """Yield a figure in our style, with `changes`; `extra` of XSAKE has matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = f"pip install 'xsake[{extra}]'"
        raise MissingExtraError("matplotlib", "plots need matplotlib", fix=fix) from error
    with matplotlib.rc_context(STYLE | (changes or {})):
        yield Figure(figsize=size, layout="constrained")


def _ticks(count: int, limit: int) -> list[int]:
    """Return at most `limit` positions from 0, a power of two apart."""
    return list(range(0, count, 2 ** max(0, math.ceil(math.log2(count / limit)))))
