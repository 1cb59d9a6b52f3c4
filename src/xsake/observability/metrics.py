"""The one table of metrics: names, units and meanings, for files, trackers and pages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Axis = Literal["layer", "head"]


@dataclass(frozen=True)
class Metric:
    """Something that a run measures.

    Args:
        name: in files, trackers and pages; Prometheus has it with `xsake_` before it.
        unit: what a number counts.
        meaning: one sentence without its full stop.
        axes: of its numbers; empty: there is one.
        source: who tells it: every step, a probe, an evaluation, or whoever reads the run.
    """

    name: str
    unit: str
    meaning: str
    axes: tuple[Axis, ...] = ()
    source: Literal["step", "probe", "evaluation", "reader"] = "step"


_BY_HEAD: tuple[Axis, ...] = ("layer", "head")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("loss", "nats per token", "mean of -log p over the predicted tokens of a step"),
        Metric("gradient_norm", "1", "norm of all gradients before clipping"),
        Metric("learning_rate", "1", "of the update, whether it was made or not"),
        Metric("is_skipped", "0 or 1", "whether the guard refused the update"),
        Metric("skips", "updates", "refused in a row, this one included"),
        Metric("tokens", "tokens", "that the step predicted"),
        Metric("step_seconds", "s", "from the end of the step before to the end of this one"),
        Metric("tokens_per_second", "tokens/s", "predicted in those seconds"),
        Metric("budget", "share", "blocks that attention computes of those it may see"),
        Metric("failed_saves", "saves", "that failed since the last one that did not"),
        Metric("validation_loss", "nats per token", "on other text", source="evaluation"),
        Metric("entropy", "nats", "of dense attention, mean over probe rows", _BY_HEAD, "probe"),
        Metric(
            "kept_mass", "share", "of dense attention that the computed blocks hold", _BY_HEAD,
            "probe",
        ),
        Metric("kept_least", "share", "the same for the query that keeps least", _BY_HEAD, "probe"),
        Metric("kl", "nats", "KL(sparse || dense), mean over probe rows", _BY_HEAD, "probe"),
        Metric("budget_spent", "share", "computed / visible blocks", _BY_HEAD, "probe"),
        Metric("drift", "ratio", "mean KL now / as the plan promised", source="probe"),
        Metric(
            "heads_lost", "heads", "that lose far more than the plan promised", source="probe"
        ),
        Metric(
            "work_excess", "ratio", "work of the busiest shard / of the mean one", source="probe"
        ),
        Metric("probe_seconds", "s", "that the probe took, compilation included", source="probe"),
        Metric("goodput", "share", "of the run's time that new steps took", source="reader"),
        Metric("last_told", "s since 1970", "when the run last told something", source="reader"),
        Metric("skipped_total", "updates", "refused since the run began", source="reader"),
    )
}  # fmt: skip
"""By name, in the order that they are shown in."""


def markdown_table() -> str:
    """The table of the documentation."""
    lines = ["| name | unit | by | what it is | told by |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        words = metric.meaning.replace("|", r"\|")
        by = " and ".join(metric.axes)
        lines.append(f"| `{metric.name}` | {metric.unit} | {by} | {words} | {metric.source} |")
    return "\n".join(lines) + "\n"


MOST_SERIES = 2**15  # of one line: 512 layers of 64 heads


def flat(values: Mapping[str, Any]) -> dict[str, float]:
    """Known metrics as single numbers: `entropy/3/5` is layer 3, head 5.

    What is no finite number, or no metric, is left out.

    Args:
        values: of one line; a metric by layer and head is a list of lists.

    Example:
        >>> flat({"loss": 2.5, "entropy": [[0.5, 0.25]], "note": "words", "is_skipped": False})
        {'loss': 2.5, 'entropy/0/0': 0.5, 'entropy/0/1': 0.25, 'is_skipped': 0.0}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        metric = METRICS.get(name)
        if metric is not None:
            _spread(name, value, len(metric.axes), found)
    return found


def _spread(name: str, value: Any, depth: int, found: dict[str, float]) -> None:
    if len(found) >= MOST_SERIES:
        return
    if depth and isinstance(value, list | tuple):
        for place, part in enumerate(value):
            _spread(f"{name}/{place}", part, depth - 1, found)
    elif not depth and isinstance(value, int | float) and math.isfinite(value):
        found[name] = float(value)
