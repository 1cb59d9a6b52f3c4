"""The report of a plan as one HTML file: words first, then maps, heads, rules and bounds."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xsake import _json
from xsake.hads.report.bounds import Bounds
from xsake.hads.report.chart import policy_chart
from xsake.hads.report.figures import ORACLE, Figures
from xsake.hads.report.heads import head_section, map_section
from xsake.hads.report.ladder import OURS, TARGET_KL, Comparison
from xsake.pages.frame import framed
from xsake.pages.markup import Markup, element, joined, scrolled, table

MOST_PAGE_BYTES = 2**25


def page(figures: Figures) -> str:
    """The whole page: it needs no network, no script and no other file.

    Args:
        figures: what it shows.
    """
    sections = {
        "Summary": _summary(figures),
        "Heads at a glance": map_section(figures),
        "Every head": head_section(figures),
    }
    if figures.comparisons:
        sections["Rules compared"] = joined(_comparison(one) for one in figures.comparisons)
    if figures.bounds is not None:
        sections["Bounds"] = _bounds(figures.bounds)
    return framed(f"{figures.plan.model.name}: sparsity plan", sections)


def write(figures: Figures, path: Path) -> int:
    """Write the page, whole or not at all; returns its bytes."""
    text = page(figures)
    _json.write(path, text, max_bytes=MOST_PAGE_BYTES)
    return len(text.encode())


def _summary(figures: Figures) -> Markup:
    first, *others = _sentences(figures)
    return joined((
        element("p", first, class_="first"),
        element("p", " ".join(others)),
        element("div", table("What was calibrated, and how", ("what", "value"), _facts(figures)),
                class_="facts"),
    ))  # fmt: skip


def _sentences(figures: Figures) -> Iterator[str]:
    plan, shares = figures.plan, figures.shares
    yield (
        f"Of every 100 blocks of {plan.block} x {plan.block} tokens that causality leaves, this"
        f" plan computes {100 * shares.mean():.1f}; with the choice of blocks that costs"
        f" {100 * plan.effective_budget:.1f} % of dense attention."
    )
    yield (
        f"Heads differ: the narrowest computes {shares.min():.1%} of its blocks, the"
        f" broadest {shares.max():.1%}."
    )
    losses, best = figures.losses(), figures.losses(ORACLE)
    if losses is not None and best is not None:
        yield (
            f"On the texts of the calibration heads lose a mean KL of {losses.mean():.4f} nats:"
            f" {np.exp(-losses.mean()):.1%} of the attention of a typical query is kept. Perfect"
            f" knowledge of the blocks would lose {best.mean():.4f} nats with the same counts."
        )
    elif figures.profile is None:
        yield "No profile was given, so nothing is said about what the heads keep."
    else:
        yield "What its blocks keep was not calibrated: no selector chooses them."
    effects = figures.effects()
    if effects is not None:
        yield (
            f"By the slopes of the model's own predictions, those change by a KL of"
            f" {effects.sum():.4f} nats per token: each head alone, to second order, all added up."
        )
    yield (
        "That is attention alone, with dense inputs in every layer; what the model then says is"
        " measured by xsake evaluate --plan."
    )


def _facts(figures: Figures) -> Iterator[tuple[str, str]]:
    plan, origin = figures.plan, figures.plan.calibration
    machine = origin.environment
    commit = "none" if machine.commit is None else machine.commit
    settings = lambda given: ", ".join(f"{name}={value}" for name, value in given.items())
    model = plan.model
    yield "budget", f"{plan.budget:.2%} of the visible blocks"
    yield "effective budget", f"{plan.effective_budget:.2%}, the choice of blocks included"
    yield (
        "model",
        f"{model.name}, {model.layers} layers of {model.q_heads} heads ({model.kv_heads} kv)",
    )
    yield "model files", model.digest
    yield "documents", f"{origin.documents}, {origin.tokens:,} tokens"
    yield "context", f"{origin.context:,} tokens of each, in blocks of {plan.block}"
    yield (
        "always computed",
        f"of every row the first {plan.always.sinks} and the last {plan.always.locals} blocks",
    )
    yield "policy", f"{plan.policy.name} {settings(plan.policy.settings)}"
    yield "selector", f"{plan.selector.name} {settings(plan.selector.settings)}"
    yield "cost of choosing", f"{plan.selector.cost:.2%} of dense attention, if all heads choose"
    yield "commit", commit + (" with changes" if machine.dirty else "")
    yield "made", f"{machine.utc}, {machine.cpu}, {machine.cores} cores"
    yield "versions", settings(machine.versions)
    yield "profile", origin.profile


def _comparison(comparison: Comparison) -> Markup:
    ours = next((rule for rule in comparison.rules if rule.is_ours), None)
    about = (
        f"Means of {comparison.origin}. Every rule computes exactly as many blocks. KL is that of"
        " attention alone; less is better."
    )
    if ours is not None:
        about += f" The thick line with points is {OURS}."
    caption = (
        f"Blocks needed for KL {TARGET_KL}: between measured budgets by a straight line through"
        " the logarithms of KL"
    )
    budgets = sorted({row.budget for rule in comparison.rules for row in rule.rows})
    columns = ("rule", "blocks", "with choosing", *(f"KL at {budget:.1%}" for budget in budgets))
    rows = []
    for rule in comparison.rules:
        known = {row.budget: f"{row.kl:.4f}" for row in rule.rows}
        name = element("strong", rule.name, " (thick line)") if rule.is_ours else rule.name
        cells = [rule.needed(), rule.needed(with_choosing=True)]
        rows.append((name, *cells, *(known.get(budget, "") for budget in budgets)))
    return joined((
        element("h3", f"{comparison.context:,} tokens, blocks of {comparison.block}"),
        element("p", about),
        scrolled(policy_chart(comparison), "chart of all rules"),
        table(caption, columns, rows),
    ))  # fmt: skip


def _bounds(bounds: Bounds) -> Markup:
    words = lambda value: f"{value:.6g}" if isinstance(value, float) else value
    single = ((name, words(value)) for name, value in bounds.figures.items())
    parts = [table("Single figures, as their file has them", ("what", "value"), single)]
    for name, rows in bounds.tables.items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        cells = ((words(row.get(key, "")) for key in columns) for row in rows)
        whole = table(f"{name}, as its file has it", columns, cells)
        parts.append(element("details", element("summary", name), whole))
    return joined(parts)
