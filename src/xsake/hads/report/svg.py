"""SVG heat maps and curves of heads, embedded in the page."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from xsake.hads.budget import ForcedBlocks, level_totals, visible_blocks
from xsake.pages.markup import Markup, element

MAX_POINTS = 24  # of a line
CELL = 38, 20
MARGIN = 34  # for layer numbers
PANEL = 240, 120  # width and height of the plot of kept mass
STRIP = 56  # height of the plot of mass by distance
MIN_MASS = 1e-5  # lower end of the logarithmic axis


def heat_map(
    values: Float[np.ndarray, "L Hq"],
    *,
    label: str,
    max_value: float,
    cell_text: Callable[[float], str],
    tooltip: Callable[[float], str],
) -> Markup:
    """Draw a heat map of layers (rows) and heads (columns) with a number in every cell.

    Args:
        values: at least 0.
        label: accessible name.
        max_value: value of the strongest colour.
        cell_text: formats a value in two or three characters.
        tooltip: formats a value for the tooltip.
    """
    layers, heads = values.shape
    wide, high = CELL
    cells = [
        element(
            "g",
            element("title", f"layer {i}, head {j}: {tooltip(value)}"),
            element(
                "rect",
                x=MARGIN + j * wide,
                y=high + i * high,
                width=wide - 1,
                height=high - 1,
                fill_opacity=round(min(value / max_value, 1), 2) if max_value > 0 else 0,
            ),
            element("text", cell_text(value), x=MARGIN + (j + 0.5) * wide, y=high * (i + 1.7)),
        )
        for i, row in enumerate(values.tolist())
        for j, value in enumerate(row)
    ]
    rows = [
        element(
            "a",
            element("text", f"L{i}", x=MARGIN - 16, y=high * (i + 1.7)),
            href=f"#layer-{i}",
            aria_label=f"layer {i} in detail",
        )
        for i in range(layers)
    ]
    tops = [
        element("text", f"H{j}", x=MARGIN + (j + 0.5) * wide, y=high * 0.7) for j in range(heads)
    ]
    size = MARGIN + heads * wide, (layers + 1) * high
    return element(
        "svg",
        *rows,
        *tops,
        *cells,
        class_="map",
        viewBox=f"0 0 {size[0]} {size[1]}",
        style=f"min-width:{MARGIN + heads * 24}px;max-width:{size[0] * 1.3:.0f}px",
        role="group",
        aria_label=label,
    )


def head_picture(
    title: str,
    curves: Sequence[tuple[str, Float[np.ndarray, " levels"]]],
    point: tuple[float, float] | None,
    offset_mass: Float[np.ndarray, " Nk"],
    forced: ForcedBlocks,
) -> Markup:
    """Draw the kept mass of one head against the share of blocks, and its mass by distance.

    Args:
        title: tooltip and accessible name.
        curves: CSS class and mean of -log(kept mass) at `k` from 0 blocks per row.
        point: share of blocks and kept mass of the plan.
        offset_mass: mean mass of blocks by distance.
        forced: blocks that the head always computes.
    """
    wide, high = PANEL
    lines = [
        element("polyline", class_=name, points=_kept_points(curve, forced))
        for name, curve in curves
    ]
    if point is not None:
        centre = {"cx": round(point[0] * wide), "cy": round((1 - point[1]) * high)}
        lines.append(element("circle", class_="plan", r=7, **centre))
    return element(
        "svg",
        element("title", title),
        element("path", class_="frame", d=f"M0 0V{high}H{wide}M0 {high + 8}v{STRIP}h{wide}"),
        *lines,
        element("polyline", class_="far", points=_distance_points(offset_mass)),
        class_="head",
        viewBox=f"-8 -8 {wide + 16} {high + STRIP + 20}",
        role="img",
    )


def _kept_points(curve: Float[np.ndarray, " levels"], forced: ForcedBlocks) -> str:
    """Return kept mass over the share of blocks, at most `MAX_POINTS` points."""
    n = len(curve) - 1
    levels = np.arange(min(forced.blocks_per_row, n), n + 1)
    cost = level_totals(levels, n, forced)
    grid = np.linspace(cost[0], cost[-1], MAX_POINTS)
    index = np.unique(np.searchsorted(cost, grid))
    x = cost[index] / visible_blocks(n) * PANEL[0]
    y = (1 - np.exp(-curve[levels[index]])) * PANEL[1]
    return _points(x, y)


def _distance_points(offset_mass: Float[np.ndarray, " Nk"]) -> str:
    """Return mass over distance in blocks, both logarithmic; large distances are averaged."""
    n = len(offset_mass)
    edges = np.unique(np.geomspace(1, n + 1, MAX_POINTS + 1).round().astype(int)) - 1
    sums = np.add.reduceat(offset_mass, edges[:-1])
    masses = np.clip(sums / np.diff(edges), MIN_MASS, 1)
    middle = np.log1p((edges[:-1] + edges[1:] - 1) / 2) / max(math.log(n), 1e-9)
    return _points(middle * PANEL[0], PANEL[1] + 8 + np.log(masses) / math.log(MIN_MASS) * STRIP)


def _points(x: Float[np.ndarray, " P"], y: Float[np.ndarray, " P"]) -> str:
    return " ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x, y, strict=True))
