"""The policy comparison as one SVG: KL against the effective budget, our rule before all others."""

import math
from collections.abc import Sequence

from xsake.hads.report.ladder import LEAST_KL, TARGET_KL, Comparison, Rule
from xsake.pages.markup import Markup, element

LEFT, TOP, WIDE, LABELS = 52, 14, 430, 210
LINE = 13.0  # height of a name beside the end of its line


class Scale:
    """From shares and KLs to places; KL in logarithms.

    Args:
        comparison: everything that has to be visible.
        high: units of the plane.
    """

    def __init__(self, comparison: Comparison, high: int):
        rows = [row for rule in comparison.rules for row in rule.rows]
        kls = [max(row.kl, LEAST_KL) for row in rows] + [TARGET_KL]
        self.high = high
        self.most = math.ceil(max(row.effective for row in rows) * 20 + 1e-9) / 20
        self._low, self._top = math.log(min(kls) / 1.1), math.log(max(kls) * 1.1)

    def x(self, share: float) -> float:
        return round(LEFT + share / self.most * WIDE, 1)

    def y(self, kl: float) -> float:
        part = (self._top - math.log(max(kl, LEAST_KL))) / (self._top - self._low)
        return round(TOP + part * self.high, 1)

    def kl_ticks(self) -> list[float]:
        """1, 2 and 5 of every power of ten that is visible."""
        powers = range(-9, 4)
        ticks = (digit * 10.0**power for power in powers for digit in (1, 2, 5))
        return [tick for tick in ticks if self._low <= math.log(tick) <= self._top]

    def share_ticks(self) -> list[float]:
        """Every 10 %, or every 5 % of a short axis."""
        step = 0.1 if self.most > 0.35 else 0.05
        return [i * step for i in range(int(self.most / step + 1e-9) + 1)]


def policy_chart(comparison: Comparison) -> Markup:
    """One line per rule with its name at its end; ours is thick and has points."""
    high = max(300, round(LINE) * (len(comparison.rules) + 2))
    scale = Scale(comparison, high)
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


def _axes(scale: Scale) -> list[Markup]:
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
    words = "effective budget: computed blocks and the cost of choosing, of dense attention"
    parts.append(element("text", words, class_="x", x=LEFT + WIDE / 2, y=bottom + 32))
    parts.append(element("text", "KL, nats", x=2, y=TOP - 3))
    return parts


def _line(rule: Rule, scale: Scale) -> Markup:
    places = [(scale.x(row.effective), scale.y(row.kl)) for row in rule.rows]
    line = element("polyline", points=" ".join(f"{x},{y}" for x, y in places))
    dots = [element("circle", cx=x, cy=y, r=3.5) for x, y in places if rule.is_ours]
    title = element("title", f"{rule.name}: {rule.needed(with_choosing=True)} for KL {TARGET_KL}")
    return element("g", title, line, *dots, class_="ours" if rule.is_ours else "rule")


def _names(rules: Sequence[Rule], scale: Scale) -> list[Markup]:
    """Names beside the ends of lines, moved apart where they would cover each other."""
    ends = sorted(rules, key=lambda rule: scale.y(rule.rows[-1].kl))
    wanted = [scale.y(rule.rows[-1].kl) for rule in ends]
    parts = []
    for rule, from_y, y in zip(
        ends, wanted, spread(wanted, LINE, float(TOP + scale.high)), strict=True
    ):
        x, end = LEFT + WIDE + 22, scale.x(rule.rows[-1].effective)
        lead = f"M{end + 4} {from_y}L{x - 4} {y:.1f}"
        parts.append(element("path", class_="lead", d=lead))
        kind = "ours" if rule.is_ours else None
        parts.append(element("text", _short(rule.name), class_=kind, x=x, y=round(y + 4, 1)))
    return parts


def spread(wanted: Sequence[float], gap: float, last: float) -> list[float]:
    """Places in the order of the wanted ones, at least `gap` apart, up to `last` if they fit.

    Example:
        >>> spread([10.0, 11.0, 50.0], 8.0, 52.0)
        [10.0, 18.0, 50.0]
        >>> spread([10.0, 50.0, 51.0], 8.0, 52.0)
        [10.0, 44.0, 52.0]
    """
    places: list[float] = []
    for place in wanted:
        places.append(max(place, places[-1] + gap) if places else place)
    limit = last
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places


def _short(name: str, most: int = 30) -> str:
    return name if len(name) <= most else name[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"
