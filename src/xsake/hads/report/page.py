"""Report of a plan as one HTML file: summary, heat maps, heads, rules and bounds."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xsake import _json
from xsake.hads.report.bounds import BoundFigures
from xsake.hads.report.chart import policy_chart
from xsake.hads.report.figures import ORACLE, ReportData
from xsake.hads.report.heads import head_section, map_section
from xsake.hads.report.ladder import OURS, TARGET_KL, RuleComparison
from xsake.pages.frame import render_page
from xsake.pages.markup import Markup, element, join, scroll_region, table

MAX_PAGE_BYTES = 2**25


def page(figures: ReportData) -> str:
    """Render the page, which needs no network, no script and no other file."""
    sections = {
        "Summary": _summary(figures),
        "Overview of heads": map_section(figures),
        "Every head": head_section(figures),
    }
    if figures.comparisons:
        sections["Rules compared"] = join(_comparison(one) for one in figures.comparisons)
    if figures.bounds is not None:
        sections["BoundFigures"] = _bounds(figures.bounds)
    return render_page(f"{figures.plan.model.name}: sparsity plan", sections)


def write(figures: ReportData, path: Path) -> int:
    """Write the page atomically; return its size in bytes."""
    text = page(figures)
    _json.write(path, text, max_bytes=MAX_PAGE_BYTES)
    return len(text.encode())


def _summary(figures: ReportData) -> Markup:
    first, *others = _sentences(figures)
    return join((
        element("p", first, class_="first"),
        element("p", " ".join(others)),
        element("div", table("Calibration", ("property", "value"), _facts(figures)),
                class_="facts"),
    ))  # fmt: skip


def _sentences(figures: ReportData) -> Iterator[str]:
    plan, shares = figures.plan, figures.shares
    yield (
        f"Of every 100 causally visible blocks of {plan.block} x {plan.block} tokens, this plan"
        f" computes {100 * shares.mean():.1f}; including block selection, its cost is"
        f" {100 * plan.effective_budget:.1f} % of dense attention."
    )
    yield (
        f"The sparsest head computes {shares.min():.1%} of its blocks, the densest"
        f" {shares.max():.1%}."
    )
    losses, best = figures.losses(), figures.losses(ORACLE)
    if losses is not None and best is not None:
        yield (
            f"On the calibration documents the mean KL of heads is {losses.mean():.4f} nats:"
            f" {np.exp(-losses.mean()):.1%} of the attention mass of a typical query is kept. An"
            f" oracle selector with the same counts has {best.mean():.4f} nats."
        )
    elif figures.profile is None:
        yield "Without a profile the kept attention mass is unknown."
    else:
        yield "The kept attention mass was not calibrated: the plan has no selector."
    effects = figures.effects()
    if effects is not None:
        yield (
            f"The estimated KL of predictions is {effects.sum():.4f} nats per token: the"
            " sum over heads, each alone, to second order, from gradients."
        )
    yield (
        "These figures are for attention with dense inputs in every layer; xsake evaluate --plan"
        " measures the whole model."
    )


def _facts(figures: ReportData) -> Iterator[tuple[str, str]]:
    plan, origin = figures.plan, figures.plan.calibration
    machine = origin.environment
    commit = "none" if machine.commit is None else machine.commit
    format_dict = lambda values: ", ".join(f"{name}={value}" for name, value in values.items())
    model = plan.model
    yield "budget", f"{plan.budget:.2%} of the visible blocks"
    yield "effective budget", f"{plan.effective_budget:.2%}, block selection included"
    yield (
        "model",
        f"{model.name}, {model.layers} layers of {model.q_heads} heads ({model.kv_heads} kv)",
    )
    yield "model files", model.digest
    yield "documents", f"{origin.documents}, {origin.tokens:,} tokens"
    yield "context", f"{origin.context:,} tokens of each, in blocks of {plan.block}"
    yield (
        "forced blocks",
        f"the first {plan.forced.num_sink} and the last {plan.forced.num_local} of every row",
    )
    yield "policy", f"{plan.policy.name} {format_dict(plan.policy.settings)}"
    yield "selector", f"{plan.selector.name} {format_dict(plan.selector.settings)}"
    yield "selection cost", f"{plan.selector.cost:.2%} of dense attention, if all heads are dynamic"
    yield "commit", commit + (" with changes" if machine.dirty else "")
    yield "made", f"{machine.utc}, {machine.cpu}, {machine.cores} cores"
    yield "versions", format_dict(machine.versions)
    yield "profile", origin.profile


def _comparison(comparison: RuleComparison) -> Markup:
    ours = next((rule for rule in comparison.rules if rule.is_ours), None)
    about = (
        f"Means of {comparison.origin}. All rules compute exactly the same number of blocks. KL is"
        " that of attention alone; lower is better."
    )
    if ours is not None:
        about += f" The thick line with points is {OURS}."
    caption = (
        f"Blocks required for KL {TARGET_KL}, by log-linear interpolation between measured budgets"
    )
    budgets = sorted({row.budget for rule in comparison.rules for row in rule.rows})
    columns = ("rule", "blocks", "with selection", *(f"KL at {budget:.1%}" for budget in budgets))
    rows = []
    for rule in comparison.rules:
        kls = {row.budget: f"{row.kl:.4f}" for row in rule.rows}
        name = element("strong", rule.name, " (thick line)") if rule.is_ours else rule.name
        cells = [rule.blocks_for_kl(), rule.blocks_for_kl(with_choosing=True)]
        rows.append((name, *cells, *(kls.get(budget, "") for budget in budgets)))
    return join((
        element("h3", f"{comparison.context:,} tokens, blocks of {comparison.block}"),
        element("p", about),
        scroll_region(policy_chart(comparison), "chart of all rules"),
        table(caption, columns, rows),
    ))  # fmt: skip


def _bounds(bounds: BoundFigures) -> Markup:
    text = lambda value: f"{value:.6g}" if isinstance(value, float) else value
    single = ((name, text(value)) for name, value in bounds.figures.items())
    parts = [table("Single figures of the file", ("name", "value"), single)]
    for name, rows in bounds.tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = ((text(row.get(key, "")) for key in columns) for row in rows)
        rows_table = table(f"{name}, from the file", columns, cells)
        parts.append(element("details", element("summary", name), rows_table))
    return join(parts)
