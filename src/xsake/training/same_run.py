"""Check that a folder belongs to the run that starts: settings, checkpoints, data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsake._io import atomic_write
from xsake.errors import ArgumentError, CheckpointError
from xsake.observability.log import parse_line
from xsake.training.checkpoints import folders
from xsake.training.config import TrainingConfig

MUTABLE_SETTINGS: Mapping[str, Any] = {
    "run": {"steps", "log_interval", "step_timeout_s"}, "mesh": True, "checkpoint": True,
    "track": True, "attention": {"probe_interval", "probe_rows"},
    "data": {"folder", "verify"},  # the data is compared by its digest
    "optimizer": {"total_steps"},  # compared as `TrainingConfig.total_steps`
}  # fmt: skip
"""Settings that may differ when a run is resumed."""


def require_same_run(config: TrainingConfig, folder: Path) -> None:
    """Save the configuration in the folder; raise if the folder belongs to another run.

    A run that failed before its first step can be started with any settings.

    Args:
        config: of the run that starts.
        folder: its `checkpoint.folder`.
    """
    path, steps = folder / "config.json", folder / "steps"
    has_started = (folder / "metrics.jsonl").exists() or any(steps.glob("*"))
    if has_started:
        before = TrainingConfig.from_json(path.read_bytes()) if path.exists() else config
        require_same_settings(before, config, str(path))
        require_saves(folder, before.checkpoint.save_interval)
    atomic_write(path, config.to_json())


def require_same_settings(before: TrainingConfig, config: TrainingConfig, source: str) -> None:
    """Raise if a run would be resumed with settings that change its results.

    Args:
        before: settings of the interrupted run.
        config: settings of the run that starts.
        source: of `before`, for messages.
    """
    old, new = (each.model_dump(exclude=dict(MUTABLE_SETTINGS)) for each in (before, config))
    changed = [
        f"{section}.{name}"
        for section, values in new.items()
        for name in values
        if values[name] != old[section][name]
    ]
    if changed:
        raise ArgumentError(
            "the folder belongs to a run with other settings",
            got=f"{config.checkpoint.folder}: different in {', '.join(changed)}",
            expected=f"the settings of {source}",
            fix="name another checkpoint.folder, or use the settings of the interrupted run",
        )
    if before.total_steps != config.total_steps:
        raise ArgumentError(
            "the learning rate of a resumed run would jump: its schedule ends at another step",
            got=f"run.steps={config.run.steps}, optimizer.total_steps="
            f"{config.optimizer.total_steps}: the schedule ends at step {config.total_steps}",
            expected=f"a schedule that ends at step {before.total_steps}, as in {source}",
            fix=f"set optimizer.total_steps={before.total_steps} and at most as many run.steps; to "
            "train longer, start in another folder with a larger optimizer.total_steps",
        )


def require_saves(folder: Path, save_interval: int) -> None:
    """Raise if a run has no checkpoints although its metrics show that it had some.

    The usual cause is a volume that is not mounted; starting at step 0 would hide the loss.

    Args:
        folder: of the run.
        save_interval: steps between checkpoints, 0: only at the end.
    """
    steps = folder / "steps"
    if folders.list_steps(steps) or folders.list_quarantined_steps(steps):
        return
    last, has_ended = _read_progress(folder / "metrics.jsonl")
    # The first save is complete when the second one starts.
    if has_ended or (save_interval and last + 1 > 2 * save_interval):
        raise ArgumentError(
            "the checkpoints of this run are missing",
            got=f"{steps} has none, and metrics.jsonl has steps up to {last}",
            expected="the checkpoints that the run has saved",
            fix="mount or restore the folder; to start the run again from step 0, delete "
            f"{folder / 'metrics.jsonl'}, or name another checkpoint.folder",
        )


def require_consistent(step: int, extra: Mapping[str, Any], config: TrainingConfig) -> None:
    """Raise if a checkpoint's record does not match its step or the run.

    Args:
        step: of the checkpoint's arrays.
        extra: record that was saved with them.
        config: of the run that would be resumed.
    """
    data = extra.get("data")
    if not isinstance(data, dict) or not isinstance(extra.get("attention"), dict):
        raise CheckpointError(
            f"the checkpoint of step {step} has no state of the data or the attention",
            got=f"a record with {', '.join(sorted(extra)) or 'no entries'}",
            expected="data and attention, as `xsake train` saves them",
            fix=f"move the folder of step {step} away to resume from the step before it",
        )
    if data.get("step") != step:
        raise CheckpointError(
            f"the checkpoint of step {step} is inconsistent: its data is at another step",
            got=f"data at step {data.get('step')}",
            expected=f"data at step {step}",
            fix=f"the record was edited: move the folder of step {step} away to resume from the "
            "step before it",
        )
    if "config" in extra:  # missing in 0.1.0
        before = TrainingConfig.from_json(json.dumps(extra["config"]))
        require_same_settings(before, config, f"the checkpoint of step {step}")


def _read_progress(metrics: Path) -> tuple[int, bool]:
    """Return the last finished step, and whether an attempt ended after its last save."""
    last, has_ended = -1, False
    try:
        with metrics.open("rb") as file:
            for line in map(parse_line, file):
                if line is None:
                    continue
                if "event" in line:
                    has_ended |= line.get("ending") in ("done", "stopped")
                elif not line.get("failed_saves"):
                    last = max(last, line["step"])
    except OSError:
        return -1, False
    return last, has_ended
