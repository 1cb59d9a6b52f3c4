"""Table of metrics: names, units and descriptions for files, trackers and pages."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Axis = Literal["layer", "head"]


@dataclass(frozen=True)
class Metric:
    """Definition of a metric."""

    name: str  # in files, trackers and pages; Prometheus adds the prefix `xsake_`
    unit: str
    meaning: str  # one sentence without a full stop
    axes: tuple[Axis, ...] = ()  # empty for a scalar
    source: Literal["step", "probe", "evaluation", "reader"] = "step"  # producer


_BY_HEAD: tuple[Axis, ...] = ("layer", "head")

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("loss", "nats per token", "mean of -log p over the predicted tokens of a step"),
        Metric("gradient_norm", "1", "norm of all gradients before clipping"),
        Metric("learning_rate", "1", "of the update, skipped or not"),
        Metric("is_skipped", "0 or 1", "whether the update was skipped"),
        Metric("consecutive_skips", "updates", "skipped in a row, this one included"),
        Metric("indexer_loss", "nats per token", "KL(attention to index), mean over layers"),
        Metric("tokens", "tokens", "predicted by the step"),
        Metric("step_seconds", "s", "from the end of the previous step to the end of this one"),
        Metric("tokens_per_second", "tokens/s", "predicted in those seconds"),
        Metric("budget", "share", "computed / visible blocks"),
        Metric("failed_saves", "saves", "failed since the last successful one"),
        Metric("validation_loss", "nats per token", "on the validation split", source="evaluation"),
        Metric("entropy", "nats", "of dense attention, mean over probe rows", _BY_HEAD, "probe"),
        Metric(
            "attn_mass_recall", "share", "of dense attention mass in the computed blocks", _BY_HEAD,
            "probe",
        ),
        Metric("attn_mass_recall_min", "share", "its minimum over queries", _BY_HEAD, "probe"),
        Metric("kl", "nats", "KL(sparse || dense), mean over probe rows", _BY_HEAD, "probe"),
        Metric("block_density", "share", "computed / visible blocks", _BY_HEAD, "probe"),
        Metric("drift", "ratio", "mean KL now / calibrated mean KL", source="probe"),
        Metric(
            "drifted_heads", "heads", "with a KL far above their calibrated KL", source="probe"
        ),
        Metric(
            "work_excess", "ratio", "work of the busiest shard / mean work", source="probe"
        ),
        Metric("probe_seconds", "s", "duration of the probe, compilation included", source="probe"),
        Metric("goodput", "share", "of the run's time spent on new steps", source="reader"),
        Metric("last_update_time", "s since 1970", "time of the last line", source="reader"),
        Metric("skipped_total", "updates", "skipped since the start of the run", source="reader"),
    )
}  # fmt: skip
"""By name, in display order."""

RENAMED: Mapping[str, str] = {
    "budget_spent": "block_density", "heads_lost": "drifted_heads",
    "kept_least": "attn_mass_recall_min", "kept_mass": "attn_mass_recall",
    "skips": "consecutive_skips",
}  # fmt: skip
"""Current name by name in the metrics.jsonl of 0.1.0."""


def rename_metrics(line: dict[str, Any]) -> dict[str, Any]:
    """Return a line of a metrics file with the current names of its metrics.

    Example:
        >>> rename_metrics({"step": 3, "skips": 1})
        {'step': 3, 'consecutive_skips': 1}
    """
    if not RENAMED.keys() & line.keys():
        return line
    return {RENAMED.get(name, name): value for name, value in line.items()}


MAX_SERIES = 2**15  # per line: 512 layers of 64 heads


def flatten_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Flatten metrics into scalars: `entropy/3/5` is layer 3, head 5.

    Unknown names and values that are not finite numbers are dropped.

    Example:
        >>> flatten_metrics({"loss": 2.5, "entropy": [[0.5, 0.25]], "is_skipped": False})
        {'loss': 2.5, 'entropy/0/0': 0.5, 'entropy/0/1': 0.25, 'is_skipped': 0.0}
    """
    scalars: dict[str, float] = {}
    for name, value in values.items():
        if name in METRICS:
            _flatten_into(name, value, len(METRICS[name].axes), scalars)
    return scalars


def _flatten_into(name: str, value: Any, depth: int, scalars: dict[str, float]) -> None:
    if len(scalars) >= MAX_SERIES:
        return
    if depth and isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _flatten_into(f"{name}/{index}", part, depth - 1, scalars)
    elif not depth and isinstance(value, int | float) and math.isfinite(value):
        scalars[name] = float(value)
