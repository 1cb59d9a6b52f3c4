"""The heads of a plan on a page: maps of all of them, and each with its curves and numbers."""

from collections.abc import Iterator

import numpy as np

from xsake.hads.plan_parts import HeadPlan
from xsake.hads.report.figures import ORACLE, Figures
from xsake.hads.report.svg import head_picture, heat_map
from xsake.pages.markup import Markup, element, joined, scrolled, table

_PERCENT = lambda value: f"{100 * value:.0f}"


def map_section(figures: Figures) -> Markup:
    """Layer by head: shares of blocks, and what was measured of the heads."""
    maps = [
        _map(
            "Share of blocks, percent",
            figures.shares,
            1.0,
            _PERCENT,
            lambda share: f"computes {share:.1%} of its blocks",
        )
    ]
    if (profile := figures.profile) is not None:
        maps.append(
            _map(
                "Entropy of attention over tokens, nats",
                profile.entropy,
                float(profile.entropy.max()),
                lambda nats: f"{nats:.1f}",
                lambda nats: f"entropy {nats:.3f} nats",
            )
        )
        maps.append(
            _map(
                "Mass outside the blocks that are always computed, percent",
                profile.outside,
                1.0,
                _PERCENT,
                lambda mass: f"{mass:.1%} of its attention is outside the always-on blocks",
            )
        )
    words = (
        "A row is a layer, a column a head; a stronger colour is a larger number, and the number"
        " is in the cell. A layer's name leads to its heads."
    )
    return joined((element("p", words), element("div", *maps, class_="maps")))


def _map(title: str, values: np.ndarray, most: float, shown, told) -> Markup:
    picture = heat_map(values, label=title, most=most, shown=shown, told=told)
    return element("figure", element("figcaption", title), scrolled(picture, title))


def head_section(figures: Figures) -> Markup:
    """A part per layer, closed until somebody opens it."""
    measured = figures.measured()
    layers = (_layer(figures, measured, layer) for layer in range(figures.plan.model.layers))
    return joined((*_legend(figures), *layers))


def _legend(figures: Figures) -> Iterator[Markup]:
    if figures.profile is None:
        return
    sample = lambda kind: element(
        "svg", element("polyline", class_=kind, points="0,10 60,10"), viewBox="0 0 60 20"
    )
    dot = element("svg", element("circle", class_="plan", cx=30, cy=10, r=7), viewBox="0 0 60 20")
    keys = [(sample("best"), "if the best blocks were known (dashed)")]
    if figures.curves() is not None:
        chosen = f"by the selector {figures.plan.selector.name}"
        keys = [(sample("choice"), chosen), *keys, (dot, "the plan")]
    yield element(
        "p",
        "Upper part of each picture: share of a query's attention that is kept (up, 0 to 1) with a"
        " share of the blocks (right, 0 to 1). Lower part: mean attention mass of a block by its"
        " distance from the diagonal, both in logarithms, down to 0.00001.",
    )
    spans = (element("span", picture, " ", words) for picture, words in keys)
    yield element("p", *spans, class_="key")


def _layer(figures: Figures, measured: dict[str, np.ndarray], layer: int) -> Markup:
    shares = figures.shares[layer]
    words = f"Layer {layer}: {shares.mean():.0%} of the blocks"
    words += f", heads {shares.min():.0%} to {shares.max():.0%}"
    if "kl" in measured:
        words += f", KL {measured['kl'][layer].mean():.3f}"
    heads = range(figures.plan.model.q_heads)
    pictures = [_picture(figures, measured, layer, head) for head in heads]
    gallery = element("div", *pictures, class_="heads") if figures.profile is not None else ""
    names = {
        "share": "share of blocks", "entropy": "entropy, nats", "outside": "mass outside always-on",
        "need90": "blocks for 90 % of mass", "kl": "KL, nats", "kl_oracle": "KL, best blocks",
        "effect": "KL of predictions, 0.001 nats",
    }  # fmt: skip
    known = [name for name in names if name in measured]
    rows = (
        (
            f"L{layer}H{head}",
            _kind(figures.plan.heads[layer][head]),
            f"{figures.plan.heads[layer][head].blocks:,}",
            *(_told(name, float(measured[name][layer, head])) for name in known),
        )
        for head in heads
    )
    columns = ("head", "kind", "blocks", *(names[name] for name in known))
    numbers = table(f"Heads of layer {layer}", columns, rows)
    return element("details", element("summary", words), gallery, numbers, id=f"layer-{layer}")


def _kind(head: HeadPlan) -> str:
    if head.kind != "static":
        return head.kind
    return f"static: {len(head.offsets)} diagonals, {len(head.columns)} columns"


def _told(name: str, value: float) -> str:
    if name == "effect":
        return f"{1000 * value:.3f}"
    return f"{value:.1%}" if name in ("share", "outside", "need90") else f"{value:.4f}"


def _picture(
    figures: Figures, measured: dict[str, np.ndarray], layer: int, head: int
) -> Markup | str:
    if (profile := figures.profile) is None:
        return ""
    name, share = f"L{layer}H{head}", float(measured["share"][layer, head])
    lines = [("best", figures.curves(ORACLE)), ("choice", figures.curves())]
    curves = [(kind, found[layer, head]) for kind, found in lines if found is not None]
    point, title, short = None, f"{name}: {share:.1%} of its blocks", f"{name} {share:.0%}"
    if "kl" in measured:
        kept = float(np.exp(-measured["kl"][layer, head]))
        point = share, kept
        title += f" keep {kept:.1%} of its attention"
        short += f", keeps {kept:.0%}"
    mass = profile.offset_mass[layer, head]
    picture = head_picture(title, curves, point, mass, profile.always)
    return element("figure", picture, element("figcaption", short))
