"""Settings that were renamed after version 0.1.0; their old names are accepted everywhere."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from xsake.errors import ArgumentError

RENAMED: Mapping[str, Mapping[str, str]] = {
    "model": {
        "compute": "compute_dtype",
        "is_rematerialised": "remat",
        "logit_positions": "loss_chunk_size",
    },
    "optimizer": {
        "accumulation": "grad_accum_steps",
        "final_share": "end_lr_ratio",
        "undecayed": "no_decay",
        "undecayed_axes": "no_decay_axes",
        "undecayed_paths": "no_decay_paths",
    },
    "attention": {
        "is_balanced": "balance_heads",
        "probe_every": "probe_interval",
        "recalibrate_every": "recalibration_interval",
    },
    "checkpoint": {"every": "save_interval", "keep": "max_to_keep"},
    "guard": {
        "is_on": "enabled",
        "most_skips": "max_consecutive_skips",
        "sigmas": "zscore_threshold",
    },
    "track": {"seconds": "min_interval_s"},
    "run": {
        "check_replicas_every": "replica_check_interval",
        "evaluate_every": "eval_interval",
        "evaluation_batches": "eval_batches",
        "hang_seconds": "step_timeout_s",
        "log_every": "log_interval",
    },
}
"""Current name by old name, for each section."""

_SECTION = re.compile(r'  "(\w+)": ')
_SETTING = re.compile(r'    "(\w+)": ')


def rename_path(path: Sequence[str]) -> list[str]:
    """Return the current path of a setting.

    Example:
        >>> rename_path(["guard", "sigmas"])
        ['guard', 'zscore_threshold']
    """
    section, *rest = path
    if rest:
        rest[0] = RENAMED.get(section, {}).get(rest[0], rest[0])
    return [section, *rest]


def rename_settings(document: Any) -> Any:
    """Return a configuration with every renamed setting under its current name.

    Args:
        document: nested dictionaries; anything else is returned as it is.
    """
    if not isinstance(document, dict):
        return document
    return {section: _rename_section(section, values) for section, values in document.items()}


def restore_old_names(text: str) -> str:
    """Return the JSON text of a configuration with the names of 0.1.0, so that digests are stable.

    Args:
        text: indented by 2, as `TrainingConfig.to_json` returns it.
    """
    old = {section: {new: old for old, new in names.items()} for section, names in RENAMED.items()}
    section, lines = "", []
    for line in text.splitlines(keepends=True):
        if match := _SECTION.match(line):
            section = match[1]
        elif (match := _SETTING.match(line)) and match[1] in old.get(section, {}):
            line = f'    "{old[section][match[1]]}": {line[match.end() :]}'
        lines.append(line)
    return "".join(lines)


def _rename_section(section: Any, values: Any) -> Any:
    names = RENAMED.get(section, {}) if isinstance(section, str) else {}
    if not isinstance(values, dict) or not names.keys() & values.keys():
        return values
    for old in names.keys() & values.keys():
        if names[old] in values:
            raise ArgumentError(
                "a setting is given twice, by its old and its current name",
                got=f"{section}.{old} and {section}.{names[old]}",
                expected=f"{section}.{names[old]}",
                fix=f"remove {section}.{old}",
            )
    return {names.get(name, name): value for name, value in values.items()}
