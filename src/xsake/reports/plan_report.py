"""Report of a sparsity plan: an HTML page, its figures as JSON, and plots as PNG."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float
from pydantic import Field

from xsake import _json
from xsake._format import format_commit
from xsake._schema import Count, Fraction, Frozen, Number, Positive, Text, validate
from xsake.errors import ArgumentError
from xsake.hads import ForcedBlocks, Profile, SparsityPlan
from xsake.hads.budget import level_totals, visible_blocks
from xsake.hads.drift import loss_at, require_profile
from xsake.reports import pages, plots

ORACLE, OURS = "oracle", "hads"
CURVE = ("budget", "effective", "kl")  # of a rule
TARGET_KL = 0.089
MIN_KL = 1e-9
MAX_PAGE_BYTES = 2**25
ROWS, BOUNDS = "a row of a policy comparison", "figures about bounds"
MAX_ROWS_BYTES, MAX_ROWS, MAX_BOUNDS_BYTES = 2**24, 20_000, 2**20
MAX_POINTS = 24  # of a line of a head
PANEL, STRIP = (240, 120), 56  # SVG units: plot of kept mass, height of the mass by distance
MIN_MASS = 1e-5  # lower end of the logarithmic axis


class ComparisonRow(Frozen, extra="ignore"):
    """KL of one rule at one budget; other keys of a row are ignored."""

    context: Positive
    block: Positive
    rule: Text
    budget: Fraction
    effective: Annotated[Number, Field(ge=0)] = Field(description="budget + selection cost")
    documents: Count
    kl: Annotated[Number, Field(ge=0)]


class RequiredShare(NamedTuple):
    """Share of blocks that a rule requires, or a bound if it is outside of the measured range."""

    share: float
    relation: Literal["=", "<", ">"]

    def __str__(self) -> str:
        return f"{self.relation} {self.share:.1%}".removeprefix("= ")


@dataclasses.dataclass(frozen=True)
class RuleCurve:
    """KL of one rule at ascending budgets."""

    name: str
    rows: tuple[ComparisonRow, ...]

    @property
    def is_ours(self) -> bool:
        return self.name == OURS

    def blocks_for_kl(self, *, with_choosing: bool = False) -> RequiredShare:
        """Return the share of blocks for `TARGET_KL`, by log-linear interpolation."""
        shares = [row.effective if with_choosing else row.budget for row in self.rows]
        return interpolate_share(shares, [row.kl for row in self.rows], TARGET_KL)


@dataclasses.dataclass(frozen=True)
class RuleComparison:
    """All rules at one context and block size, by ascending number of required blocks."""

    context: int
    block: int
    rules: tuple[RuleCurve, ...]
    commit: str | None

    @property
    def documents(self) -> int:
        """Smallest number of documents of a row."""
        return min(row.documents for rule in self.rules for row in rule.rows)

    @property
    def title(self) -> str:
        return f"{self.context:,} tokens, blocks of {self.block}"

    @property
    def origin(self) -> str:
        plural = "" if self.documents == 1 else "s"
        return f"{self.documents} document{plural}, commit {self.commit or 'unknown'}"

    def to_dict(self) -> dict[str, Any]:
        """Return the data of chart and table as JSON values."""
        rules = [
            {
                "rule": rule.name,
                "needed": rule.blocks_for_kl()._asdict(),
                "needed_with_choosing": rule.blocks_for_kl(with_choosing=True)._asdict(),
            }
            | {name: [getattr(row, name) for row in rule.rows] for name in CURVE}
            for rule in self.rules
        ]
        sizes = {"context": self.context, "block": self.block, "documents": self.documents}
        return {**sizes, "commit": self.commit, "target_kl": TARGET_KL, "rules": rules}


def interpolate_share(
    shares: Sequence[float], kls: Sequence[float], target: float
) -> RequiredShare:
    """Return the ascending share at which a falling KL first reaches a target.

    Example:
        >>> str(interpolate_share([0.1, 0.2, 0.4], [0.4, 0.2, 0.05], 0.1))
        '30.0%'
        >>> str(interpolate_share([0.1, 0.2], [0.4, 0.2], 0.1))
        '> 20.0%'
    """
    index = next((i for i, kl in enumerate(kls) if kl <= target), None)
    if index is None:
        return RequiredShare(shares[-1], ">")
    if index == 0:
        return RequiredShare(shares[0], "=" if kls[0] == target else "<")
    above, below, goal = (math.log(max(kl, MIN_KL)) for kl in (kls[index - 1], kls[index], target))
    fraction = (above - goal) / (above - below)
    return RequiredShare(shares[index - 1] + fraction * (shares[index] - shares[index - 1]), "=")


def read_comparisons(path: Path) -> tuple[RuleComparison, ...]:
    """Read the comparisons of a .jsonl file.

    A line without a rule has the environment of the rows after it.
    """
    data = _json.read(path, max_bytes=MAX_ROWS_BYTES)
    lines = [line for line in data.splitlines() if line.strip()]
    if len(data) > MAX_ROWS_BYTES or len(lines) > MAX_ROWS:
        raise _json.invalid_file("rows of a policy comparison", "more than 16 MB or 20000 lines")
    groups: dict[tuple[int, int], dict[str, list[ComparisonRow]]] = {}
    commits, commit = {}, None
    for line in lines:
        document = _json.loads(line, what=ROWS, max_bytes=MAX_ROWS_BYTES, max_containers=2**12)
        if "rule" in document:
            row = validate(ComparisonRow, document, what=ROWS)
            size = row.context, row.block
            groups.setdefault(size, {}).setdefault(row.rule, []).append(row)
            commits[size] = commit
        else:
            commit = _commit(document)
    if not groups:
        raise ArgumentError(
            "report-rows", "the file has no rows", got=path, expected="one line per measurement"
        )
    return tuple(
        RuleComparison(*size, _sort_rules(rules), commits[size])
        for size, rules in sorted(groups.items())
    )


def _sort_rules(rules: dict[str, list[ComparisonRow]]) -> tuple[RuleCurve, ...]:
    """Sort by required share; rules that do not reach the target come last, by their last KL."""
    curves = []
    for name, rows in rules.items():
        rows.sort(key=lambda row: row.budget)
        for before, after in itertools.pairwise(rows):
            if before.budget == after.budget:
                raise ArgumentError(
                    "report-duplicate",
                    "duplicate row of a rule at one budget",
                    got=f"{name} at {after.budget:.1%}, context {after.context}",
                    expected="every measurement once",
                )
        curves.append(RuleCurve(name, tuple(rows)))

    def key(rule: RuleCurve) -> tuple[bool, float, float]:
        required = rule.blocks_for_kl(with_choosing=True)
        is_above = required.relation == ">"
        return is_above, 0.0 if is_above else required.share, rule.rows[-1].kl

    return tuple(sorted(curves, key=key))


def _commit(document: dict[str, Any]) -> str | None:
    machine = document.get("environment")
    commit = machine.get("commit") if isinstance(machine, dict) else None
    return commit[:40] if isinstance(commit, str) and commit.isprintable() else None


Figure = float | int | bool | str


@dataclasses.dataclass(frozen=True)
class BoundFigures:
    """Figures about bounds: numbers and texts by path, lists of objects as tables."""

    figures: dict[str, Figure] = dataclasses.field(default_factory=dict)
    tables: dict[str, list[dict[str, Figure]]] = dataclasses.field(default_factory=dict)


def read_bounds(path: Path) -> BoundFigures:
    """Read numbers and texts of a JSON object; lists of other values are skipped."""
    data = _json.read(path, max_bytes=MAX_BOUNDS_BYTES)
    limits = {"max_bytes": MAX_BOUNDS_BYTES, "max_containers": 2**14}
    bounds, parts = BoundFigures(), [("", _json.loads(data, what=BOUNDS, **limits))]
    shorten = lambda value: value[:300] if isinstance(value, str) else value
    while parts:
        name, value = parts.pop(0)
        if isinstance(value, dict):
            parts = [(f"{name} / {key}" if name else key, x) for key, x in value.items()] + parts
        elif isinstance(value, list):
            rows = [
                {key: shorten(x) for key, x in part.items() if isinstance(x, Figure)}
                for part in value
                if isinstance(part, dict)
            ]
            if any(rows):
                bounds.tables[name] = rows
        elif value is not None:
            bounds.figures[name] = shorten(value)
    return bounds


class HeadMap(NamedTuple):
    """Heat map of layers and heads; the patterns format a cell and its tooltip."""

    title: str
    values: Float[np.ndarray, "L Hq"]
    max_value: float
    cell: str
    tooltip: str


@dataclasses.dataclass(frozen=True)
class ReportData:
    """Data of a report, from its files."""

    plan: SparsityPlan
    profile: Profile | None = None
    comparisons: tuple[RuleComparison, ...] = ()
    bounds: BoundFigures | None = None

    def __post_init__(self) -> None:
        if self.profile is not None:
            require_profile(self.plan, self.profile)

    @property
    def shares(self) -> Float[np.ndarray, "L Hq"]:
        """Computed / visible blocks of each head."""
        return self.plan.blocks / visible_blocks(self.plan.n)

    def curves(self, name: str | None = None) -> Float[np.ndarray, "L Hq levels"] | None:
        """Return the mean of -log(kept mass) at every level, by the plan's selector or another.

        None without a profile and for selectors that were not calibrated (static and random plans).
        """
        curves = {} if self.profile is None else self.profile.curves
        return curves.get(self.plan.selector.name if name is None else name)

    def losses(self, name: str | None = None) -> Float[np.ndarray, "L Hq"] | None:
        """Return KL(sparse || dense) of each head at the plan's budget, or None."""
        curves = self.curves(name)
        return None if curves is None else loss_at(curves, self.plan.blocks, self.plan.forced)

    def head_metrics(self) -> dict[str, Float[np.ndarray, "L Hq"]]:
        """Return the available metrics of each head, by name.

        `effect` is the KL of the model's predictions caused by the head alone.
        """
        metrics, profile, plan = {"share": self.shares}, self.profile, self.plan
        if profile is not None:
            names = ("entropy", "outside", "need90")
            metrics |= {name: getattr(profile, name) for name in names}
        losses = {"kl": self.losses(), "kl_oracle": self.losses(ORACLE)}
        if profile is not None and plan.selector.name in profile.effects:
            effects = profile.effects[plan.selector.name]
            losses["effect"] = loss_at(effects, plan.blocks, plan.forced)
        return metrics | {name: array for name, array in losses.items() if array is not None}

    def head_maps(self) -> list[HeadMap]:
        """Return the heat maps: share of blocks, and measurements of the profile."""
        percent = lambda title, values, text: HeadMap(title, 100 * values, 100.0, "{:.0f}", text)
        maps = [percent("Share of blocks, percent", self.shares, "computes {:.1f}% of its blocks")]
        if (profile := self.profile) is not None:
            title, text = "Entropy of attention over tokens, nats", "entropy {:.3f} nats"
            highest = float(profile.entropy.max())
            maps.append(HeadMap(title, profile.entropy, highest, "{:.1f}", text))
            text = "{:.1f}% of its attention is outside the forced blocks"
            maps.append(percent("Mass outside the forced blocks, percent", profile.outside, text))
        return maps

    def to_dict(self) -> dict[str, Any]:
        """Return all data of the page as JSON values."""
        plan, metrics = self.plan, self.head_metrics()
        digits = lambda number: float(f"{number:.6g}")
        heads = [
            [
                {"kind": head.kind, "blocks": head.blocks}
                | {name: digits(array[i, j]) for name, array in metrics.items()}
                for j, head in enumerate(layer)
            ]
            for i, layer in enumerate(plan.heads)
        ]
        parts = {"model", "calibration", "policy", "selector", "budget", "effective_budget"}
        return {
            "summary": plan.summary,
            **plan.model_dump(mode="json", include=parts | {"block", "forced"}),
            "means": {name: digits(array.mean()) for name, array in metrics.items()},
            "heads": heads,
            "comparisons": [one.to_dict() for one in self.comparisons],
            "bounds": None if self.bounds is None else dataclasses.asdict(self.bounds),
        }


def page(data: ReportData) -> str:
    """Render the page."""
    label = "Blocks required by every rule, {}; the table below has the numbers"
    charts = [
        plots.to_svg(functools.partial(_draw_rules, one), label=label.format(one.title))
        for one in data.comparisons
    ]
    return pages.render(
        "plan_report.html.j2", extra="viz", data=data, metrics=data.head_metrics(), charts=charts,
        oracle=data.curves(ORACLE), kept_points=kept_points, distance_points=distance_points,
        panel=(*PANEL, STRIP), target_kl=TARGET_KL,
    )  # fmt: skip


def write(data: ReportData, path: Path) -> int:
    """Write the page atomically; return its size in bytes."""
    text = page(data)
    _json.write(path, text, max_bytes=MAX_PAGE_BYTES)
    return len(text.encode())


def kept_points(curve: Float[np.ndarray, " levels"], forced: ForcedBlocks) -> str:
    """Return SVG points of kept mass over the share of blocks."""
    n = len(curve) - 1
    levels = np.arange(min(forced.blocks_per_row, n), n + 1)
    cost = level_totals(levels, n, forced)
    index = np.unique(np.searchsorted(cost, np.linspace(cost[0], cost[-1], MAX_POINTS)))
    x = cost[index] / visible_blocks(n) * PANEL[0]
    return _points(x, (1 - np.exp(-curve[levels[index]])) * PANEL[1])


def distance_points(offset_mass: Float[np.ndarray, " Nk"]) -> str:
    """Return SVG points of mass over distance in blocks, both logarithmic and averaged."""
    n = len(offset_mass)
    edges = np.unique(np.geomspace(1, n + 1, MAX_POINTS + 1).round().astype(int)) - 1
    masses = np.clip(np.add.reduceat(offset_mass, edges[:-1]) / np.diff(edges), MIN_MASS, 1)
    middle = np.log1p((edges[:-1] + edges[1:] - 1) / 2) / max(math.log(n), 1e-9)
    return _points(middle * PANEL[0], PANEL[1] + 8 + np.log(masses) / math.log(MIN_MASS) * STRIP)


def _points(x: Iterable[float], y: Iterable[float]) -> str:
    return " ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x, y, strict=True))


def draw(data: ReportData, folder: Path) -> tuple[Path, ...]:
    """Write plots: `heads.png`, and `rules_<context>_<block>.png` for each comparison."""
    maps = data.head_maps()
    layers, heads = data.shares.shape
    size = 1.2 + len(maps) * (0.6 + 0.32 * heads), 1.4 + 0.2 * layers
    files, source = [folder / "heads.png"], data.plan.calibration
    machine = source.environment
    origin = f"{source.documents} documents, {source.tokens:,} tokens; {machine.utc}, "
    origin += format_commit(machine.commit, machine.dirty)
    with plots.open_png(files[0], size, title=data.plan.model.name, origin=origin) as figure:
        for axes, one in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps, strict=True):
            plots.draw_heat_map(axes, one.values, one.max_value, one.cell)
            axes.set(xlabel="head", ylabel="layer")
            axes.set_title(one.title, fontsize=8)
    for one in data.comparisons:
        files.append(folder / f"rules_{one.context}_{one.block}.png")
        with plots.open_png(files[-1], None, title=one.title, origin=one.origin) as figure:
            _draw_rules(one, figure)
    return tuple(files)


def _draw_rules(comparison: RuleComparison, figure: Any) -> None:
    """Draw KL against the effective budget, and the share of blocks that each rule requires."""
    figure.set_size_inches(9.2, max(3.6, 1.2 + 0.17 * len(comparison.rules)))
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    names = []
    for index, rule in enumerate(comparison.rules):
        colour = plots.OURS if rule.is_ours else plots.FAINT
        points = [row.effective for row in rule.rows], [max(row.kl, MIN_KL) for row in rule.rows]
        style = {"lw": 2.6, "marker": "o", "ms": 5, "zorder": 3} if rule.is_ours else {"lw": 0.8}
        left.plot(*points, color=colour, **style)
        required = rule.blocks_for_kl(with_choosing=True)
        marker = {"=": "o", "<": "<", ">": ">"}[required.relation]
        size = 8 if rule.is_ours else 5
        right.plot(required.share, index, marker, color=colour, ms=size)
        names.append(f"{rule.name[:30]}  {required}")
    left.axhline(TARGET_KL, color=plots.INK, lw=1, ls=":")
    left.set(yscale="log", xlabel="effective budget: computed blocks and selection cost")
    left.set_title("KL of attention, nats")
    plots.format_ticks(left.yaxis, "{:g}", is_log=True)
    right.set_yticks(range(len(names)), names, fontsize=7)
    for label, rule in zip(right.get_yticklabels(), comparison.rules, strict=True):
        if rule.is_ours:
            label.set(fontweight="bold", color=plots.OURS)
    right.invert_yaxis()
    right.margins(y=0.02)
    right.grid(axis="y", lw=0.6)
    right.set_axisbelow(True)
    right.set(xlim=(0, None), xlabel="effective budget")
    right.set_title(f"Blocks required for KL {TARGET_KL}")
    for axes in (left, right):
        plots.format_ticks(axes.xaxis, "{:.0%}")
