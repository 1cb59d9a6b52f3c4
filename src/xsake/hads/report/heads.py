"""Sections of the report about heads: heat maps, curves and tables."""

from collections.abc import Iterator

import numpy as np

from xsake.hads.plan import HeadPlan
from xsake.hads.report.figures import ORACLE, ReportData
from xsake.hads.report.svg import head_picture, heat_map
from xsake.pages.markup import Markup, element, join, scroll_region, table

_PERCENT = lambda value: f"{100 * value:.0f}"


def map_section(figures: ReportData) -> Markup:
    """Render heat maps of layers and heads: share of blocks and measurements."""
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
                "Mass outside the forced blocks, percent",
                profile.outside,
                1.0,
                _PERCENT,
                lambda mass: f"{mass:.1%} of its attention is outside the forced blocks",
            )
        )
    text = (
        "A row is a layer, a column a head; a stronger colour is a larger number, and the number"
        " is in the cell. The name of a layer links to its heads."
    )
    return join((element("p", text), element("div", *maps, class_="maps")))


def _map(title: str, values: np.ndarray, max_value: float, cell_text, tooltip) -> Markup:
    picture = heat_map(
        values, label=title, max_value=max_value, cell_text=cell_text, tooltip=tooltip
    )
    return element("figure", element("figcaption", title), scroll_region(picture, title))


def head_section(figures: ReportData) -> Markup:
    """Render a collapsible part per layer."""
    metrics = figures.head_metrics()
    layers = (_layer(figures, metrics, layer) for layer in range(figures.plan.model.layers))
    return join((*_legend(figures), *layers))


def _legend(figures: ReportData) -> Iterator[Markup]:
    if figures.profile is None:
        return
    sample = lambda css_class: element(
        "svg", element("polyline", class_=css_class, points="0,10 60,10"), viewBox="0 0 60 20"
    )
    dot = element("svg", element("circle", class_="plan", cx=30, cy=10, r=7), viewBox="0 0 60 20")
    keys = [(sample("best"), "oracle, the true block masses (dashed)")]
    if figures.curves() is not None:
        label = f"selector {figures.plan.selector.name}"
        keys = [(sample("choice"), label), *keys, (dot, "the plan")]
    yield element(
        "p",
        "Upper plot: kept attention mass of a query (0 to 1) against the share of blocks (0 to 1)."
        " Lower plot: mean attention mass of a block against its distance from the diagonal, both"
        " logarithmic, from 0.00001.",
    )
    spans = (element("span", picture, " ", label) for picture, label in keys)
    yield element("p", *spans, class_="key")


def _layer(figures: ReportData, metrics: dict[str, np.ndarray], layer: int) -> Markup:
    shares = figures.shares[layer]
    title = f"Layer {layer}: {shares.mean():.0%} of the blocks"
    title += f", heads {shares.min():.0%} to {shares.max():.0%}"
    if "kl" in metrics:
        title += f", KL {metrics['kl'][layer].mean():.3f}"
    heads = range(figures.plan.model.q_heads)
    pictures = [_picture(figures, metrics, layer, head) for head in heads]
    gallery = element("div", *pictures, class_="heads") if figures.profile is not None else ""
    names = {
        "share": "share of blocks", "entropy": "entropy, nats", "outside": "mass outside forced",
        "need90": "blocks for 90 % of mass", "kl": "KL, nats", "kl_oracle": "KL, oracle",
        "effect": "KL of predictions, 0.001 nats",
    }  # fmt: skip
    available = [name for name in names if name in metrics]
    rows = (
        (
            f"L{layer}H{head}",
            _kind(figures.plan.heads[layer][head]),
            f"{figures.plan.heads[layer][head].blocks:,}",
            *(_format_metric(name, float(metrics[name][layer, head])) for name in available),
        )
        for head in heads
    )
    columns = ("head", "kind", "blocks", *(names[name] for name in available))
    numbers = table(f"Heads of layer {layer}", columns, rows)
    return element("details", element("summary", title), gallery, numbers, id=f"layer-{layer}")


def _kind(head: HeadPlan) -> str:
    if head.kind != "static":
        return head.kind
    return f"static: {len(head.offsets)} diagonals, {len(head.columns)} columns"


def _format_metric(name: str, value: float) -> str:
    if name == "effect":
        return f"{1000 * value:.3f}"
    return f"{value:.1%}" if name in ("share", "outside", "need90") else f"{value:.4f}"


def _picture(
    figures: ReportData, metrics: dict[str, np.ndarray], layer: int, head: int
) -> Markup | str:
    if (profile := figures.profile) is None:
        return ""
    name, share = f"L{layer}H{head}", float(metrics["share"][layer, head])
    lines = [("best", figures.curves(ORACLE)), ("choice", figures.curves())]
    curves = [(name, curve[layer, head]) for name, curve in lines if curve is not None]
    point, title, short = None, f"{name}: {share:.1%} of its blocks", f"{name} {share:.0%}"
    if "kl" in metrics:
        kept = float(np.exp(-metrics["kl"][layer, head]))
        point = share, kept
        title += f" keep {kept:.1%} of its attention mass"
        short += f", keeps {kept:.0%}"
    mass = profile.offset_mass[layer, head]
    picture = head_picture(title, curves, point, mass, profile.forced)
    return element("figure", picture, element("figcaption", short))
