"""Plots of a report as PNG: heat maps of heads and rule comparisons; requires matplotlib."""

import math
from collections.abc import Sequence
from pathlib import Path

from xsake.errors import MissingExtraError
from xsake.hads.report.chart import spread
from xsake.hads.report.figures import ReportData
from xsake.hads.report.ladder import MIN_KL, TARGET_KL, RuleComparison, RuleCurve

OURS, OTHERS, SOFT = "#d1495b", "#9aa5b1", "#555555"


def draw(figures: ReportData, folder: Path) -> tuple[Path, ...]:
    """Write the plots; requires `pip install xsake[viz]`.

    Args:
        figures: data of the report.
        folder: created if it is missing.

    Returns:
        The files: `heads.png`, and `rules_<context>_<block>.png` for each comparison.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("Plots need matplotlib.", fix="pip install 'xsake[viz]'") from error
    folder.mkdir(parents=True, exist_ok=True)
    sheets = {"heads.png": _heads(Figure, figures)}
    for one in figures.comparisons:
        sheets[f"rules_{one.context}_{one.block}.png"] = _rules(Figure, one)
    for name, sheet in sheets.items():
        sheet.savefig(folder / name, dpi=160, format="png")
    return tuple(folder / name for name in sheets)


def _heads(figure_class, figures: ReportData):
    """Draw heat maps of layers and heads, one panel per measurement."""
    panels = [("share of blocks, %", 100 * figures.shares, 100.0, "{:.0f}")]
    if (profile := figures.profile) is not None:
        highest = float(profile.entropy.max())
        panels.append(("entropy, nats", profile.entropy, highest, "{:.1f}"))
        panels.append(("mass outside forced blocks, %", 100 * profile.outside, 100.0, "{:.0f}"))
    layers, heads = figures.shares.shape
    size = (1.2 + len(panels) * (0.6 + 0.32 * heads), 1.4 + 0.2 * layers)
    sheet = figure_class(figsize=size, layout="constrained")
    for axes, (title, values, max_value, form) in zip(
        sheet.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        axes.imshow(values, cmap="Blues", vmin=0, vmax=1.6 * max_value, aspect="auto")
        for (layer, head), value in _cells(values):
            axes.text(head, layer, form.format(value), ha="center", va="center", fontsize=6)
        axes.set_title(title, loc="left", fontsize=9)
        axes.set_xlabel("head", fontsize=8)
        axes.set_ylabel("layer", fontsize=8)
        axes.tick_params(labelsize=7)
    _sign(sheet, figures.plan.model.name, _origin(figures))
    return sheet


def _cells(values):
    return (((i, j), value) for i, row in enumerate(values.tolist()) for j, value in enumerate(row))


def _rules(figure_class, comparison: RuleComparison):
    """Draw KL against the effective budget; ours is thick and has points."""
    sheet = figure_class(
        figsize=(8.6, max(5.6, 1.6 + 0.18 * len(comparison.rules))), layout="constrained"
    )
    axes = sheet.subplots()
    for rule in comparison.rules:
        style = {"color": OTHERS, "linewidth": 1.0}
        if rule.is_ours:
            style = {"color": OURS, "linewidth": 2.6, "marker": "o", "zorder": 3}
        axes.plot([row.effective for row in rule.rows], _kls(rule), **style)
    axes.axhline(TARGET_KL, color=SOFT, linestyle=":", linewidth=1)
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    _name_lines(axes, comparison.rules)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("effective budget: computed blocks and selection cost")
    axes.set_ylabel("KL(sparse || dense), nats")
    axes.set_title(f"in brackets: blocks for KL {TARGET_KL}", loc="left", fontsize=9)
    sizes = f"{comparison.context:,} tokens, blocks of {comparison.block}"
    _sign(sheet, f"Rules at equal numbers of blocks: {sizes}", comparison.origin)
    return sheet


def _kls(rule: RuleCurve) -> list[float]:
    return [max(row.kl, MIN_KL) for row in rule.rows]


def _name_lines(axes, rules: Sequence[RuleCurve]) -> None:
    """Draw names to the right of the axes, without overlap."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    down = lambda rule: (high - math.log(_kls(rule)[-1])) / (high - low)
    ends = sorted(rules, key=down)
    positions = spread([down(rule) for rule in ends], min(0.034, 1 / len(ends)), 1.0)
    for rule, position in zip(ends, positions, strict=True):
        axes.annotate(
            f"{rule.name} ({rule.blocks_for_kl(with_choosing=True)})",
            xy=(rule.rows[-1].effective, _kls(rule)[-1]),
            xytext=(1.04, 1 - position),
            textcoords="axes fraction",
            fontsize=7,
            fontweight="bold" if rule.is_ours else "normal",
            va="center",
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": OTHERS, "linewidth": 0.4, "relpos": (0, 0.5)},
        )


def _origin(figures: ReportData) -> str:
    origin = figures.plan.calibration
    machine = origin.environment
    commit = "no commit" if machine.commit is None else machine.commit[:10]
    return (
        f"{origin.documents} documents, {origin.tokens:,} tokens;"
        f" {commit}{'+' if machine.dirty else ''}, {machine.utc}"
    )


def _sign(sheet, title: str, origin: str) -> None:
    """Add the title and the origin of the numbers, without math parsing."""
    bold = {"fontweight": "bold", "fontsize": 11, "wrap": True}
    sheet.suptitle(title, x=0.01, ha="left", parse_math=False, **bold)
    sheet.supxlabel(origin, x=0.99, ha="right", fontsize=6, color=SOFT, parse_math=False)
