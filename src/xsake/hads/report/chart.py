"""SVG chart of a rule comparison: KL against the effective budget."""

import math
from collections.abc import Sequence

from xsake.hads.report.ladder import MIN_KL, TARGET_KL, RuleComparison, RuleCurve
from xsake.pages.markup import Markup, element

LEFT, TOP, WIDE, LABELS = 52, 14, 430, 210
LINE = 13.0  # height of a label next to the end of its line


class ChartScale:
    """Chart coordinates of shares (linear) and KLs (logarithmic)."""

    def __init__(self, comparison: RuleComparison, high: int):
        rows = [row for rule in comparison.rules for row in rule.rows]
        kls = [max(row.kl, MIN_KL) for row in rows] + [TARGET_KL]
        self.high = high
        self.max_share = math.ceil(max(row.effective for row in rows) * 20 + 1e-9) / 20
        self._low, self._top = math.log(min(kls) / 1.1), math.log(max(kls) * 1.1)

    def x(self, share: float) -> float:
        return round(LEFT + share / self.max_share * WIDE, 1)

    def y(self, kl: float) -> float:
        fraction = (self._top - math.log(max(kl, MIN_KL))) / (self._top - self._low)
        return round(TOP + fraction * self.high, 1)

    def kl_ticks(self) -> list[float]:
        """Return 1, 2 and 5 times powers of ten inside the axis."""
        powers = range(-9, 4)
        ticks = (digit * 10.0**power for power in powers for digit in (1, 2, 5))
        return [tick for tick in ticks if self._low <= math.log(tick) <= self._top]

    def share_ticks(self) -> list[float]:
        """Return steps of 10 %, or of 5 % on a short axis."""
        step = 0.1 if self.max_share > 0.35 else 0.05
        return [i * step for i in range(int(self.max_share / step + 1e-9) + 1)]


def policy_chart(comparison: RuleComparison) -> Markup:
    """Draw one line per rule with its name at its end; ours is thick and has points."""
    high = max(300, round(LINE) * (len(comparison.rules) + 2))
    scale = ChartScale(comparison, high)
    ordered = sorted(comparison.rules, key=lambda rule: rule.is_ours)  # ours on top of the others
    size = LEFT + WIDE + LABELS, TOP + high + 40
    return element(
        "svg",
        *_axes(scale),
        *(_line(rule, scale) for rule in ordered),
        *_names(comparison.rules, scale),
        class_="chart",
        viewBox=f"0 0 {size[0]} {size[1]}",
        role="img",
        aria_label="KL against the effective budget of every rule; the table below has the numbers",
    )


def _axes(scale: ChartScale) -> list[Markup]:
    bottom, right = TOP + scale.high, LEFT + WIDE
    parts = [element("path", class_="frame", d=f"M{LEFT} {TOP}V{bottom}H{right}")]
    for tick in scale.kl_ticks():
        y = scale.y(tick)
        parts.append(element("path", class_="grid", d=f"M{LEFT} {y}H{right}"))
        parts.append(element("text", f"{tick:g}", class_="y", x=LEFT - 6, y=y + 4))
    for tick in scale.share_ticks():
        x = scale.x(tick)
        parts.append(element("text", f"{tick:.0%}", class_="x", x=x, y=bottom + 15))
    target = scale.y(TARGET_KL)
    parts.append(element("path", class_="target", d=f"M{LEFT} {target}H{right}"))
    parts.append(element("text", f"KL {TARGET_KL}", x=LEFT + 4, y=target - 4))
    label = "effective budget: computed blocks and selection cost, of dense attention"
    parts.append(element("text", label, class_="x", x=LEFT + WIDE / 2, y=bottom + 32))
    parts.append(element("text", "KL, nats", x=2, y=TOP - 3))
    return parts


def _line(rule: RuleCurve, scale: ChartScale) -> Markup:
    points = [(scale.x(row.effective), scale.y(row.kl)) for row in rule.rows]
    line = element("polyline", points=" ".join(f"{x},{y}" for x, y in points))
    dots = [element("circle", cx=x, cy=y, r=3.5) for x, y in points if rule.is_ours]
    title = element(
        "title", f"{rule.name}: {rule.blocks_for_kl(with_choosing=True)} for KL {TARGET_KL}"
    )
    return element("g", title, line, *dots, class_="ours" if rule.is_ours else "rule")


def _names(rules: Sequence[RuleCurve], scale: ChartScale) -> list[Markup]:
    """Draw names next to the ends of lines, without overlap."""
    ends = sorted(rules, key=lambda rule: scale.y(rule.rows[-1].kl))
    line_ends = [scale.y(rule.rows[-1].kl) for rule in ends]
    parts = []
    for rule, from_y, y in zip(
        ends, line_ends, spread(line_ends, LINE, float(TOP + scale.high)), strict=True
    ):
        x, end = LEFT + WIDE + 22, scale.x(rule.rows[-1].effective)
        lead = f"M{end + 4} {from_y}L{x - 4} {y:.1f}"
        parts.append(element("path", class_="lead", d=lead))
        css_class = "ours" if rule.is_ours else None
        parts.append(element("text", _short(rule.name), class_=css_class, x=x, y=round(y + 4, 1)))
    return parts


def spread(positions: Sequence[float], gap: float, last: float) -> list[float]:
    """Move sorted positions at least `gap` apart, up to `last` if they fit.

    Example:
        >>> spread([10.0, 11.0, 50.0], 8.0, 52.0)
        [10.0, 18.0, 50.0]
        >>> spread([10.0, 50.0, 51.0], 8.0, 52.0)
        [10.0, 44.0, 52.0]
    """
    moved: list[float] = []
    for position in positions:
        moved.append(max(position, moved[-1] + gap) if moved else position)
    limit = last
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved


def _short(name: str, max_length: int = 30) -> str:
    return name if len(name) <= max_length else name[: max_length - 1] + "\N{HORIZONTAL ELLIPSIS}"
