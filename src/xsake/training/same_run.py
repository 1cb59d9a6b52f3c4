"""Checks that a folder belongs to the run that is about to use it: settings, saves, data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xsake._io import atomic_write
from xsake.errors import ArgumentError, CheckpointError
from xsake.observability.metrics_file import parsed
from xsake.training.checkpoints import folders
from xsake.training.config import TrainingConfig

MAY_CHANGE: Mapping[str, Any] = {
    "run": {"steps", "log_every", "hang_seconds"}, "mesh": True, "checkpoint": True,
    "track": True, "attention": {"probe_every", "probe_rows"},
    "data": {"folder", "verify"},  # the data is compared by its digest
    "optimizer": {"total_steps"},  # compared as `TrainingConfig.total_steps`
}  # fmt: skip
"""Settings that may differ when a run is resumed."""


def require_same_run(config: TrainingConfig, folder: Path) -> None:
    """Keep the configuration next to the run, or raise if the folder belongs to another run.

    A run that failed before its first step left nothing to resume: anything may change.

    Args:
        config: of the run that starts.
        folder: its `checkpoint.folder`.
    """
    path, steps = folder / "config.json", folder / "steps"
    has_begun = (folder / "metrics.jsonl").exists() or any(steps.glob("*"))
    if has_begun:
        before = TrainingConfig.from_json(path.read_bytes()) if path.exists() else config
        require_same_settings(before, config, str(path))
        require_saves(folder, before.checkpoint.every)
    atomic_write(path, config.to_json())


def require_same_settings(before: TrainingConfig, config: TrainingConfig, where: str) -> None:
    """Raise if a run would be resumed with settings that change what it computes.

    Args:
        before: settings that the run has had.
        config: settings that it would get.
        where: the former come from.
    """
    old, new = (each.model_dump(exclude=dict(MAY_CHANGE)) for each in (before, config))
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
            expected=f"the settings of {where}",
            fix="name another checkpoint.folder, or use the settings of the interrupted run",
        )
    if before.total_steps != config.total_steps:
        raise ArgumentError(
            "the learning rate of a resumed run would jump: its schedule ends at another step",
            got=f"run.steps={config.run.steps}, optimizer.total_steps="
            f"{config.optimizer.total_steps}: the schedule ends at step {config.total_steps}",
            expected=f"a schedule that ends at step {before.total_steps}, as in {where}",
            fix=f"set optimizer.total_steps={before.total_steps} and at most as many run.steps; to "
            "train longer, start in another folder with a larger optimizer.total_steps",
        )


def require_saves(folder: Path, every: int) -> None:
    """Raise if a run has no checkpoints although its metrics show that it had some.

    A volume that is not mounted looks like that: starting at step 0 would hide the loss.

    Args:
        folder: of the run.
        every: its steps between checkpoints, 0: only at the end.
    """
    steps = folder / "steps"
    if folders.present(steps) or folders.quarantined(steps):
        return
    last, has_ended = _progress(folder / "metrics.jsonl")
    # The first save is complete when the second one begins.
    if has_ended or (every and last + 1 > 2 * every):
        raise ArgumentError(
            "the checkpoints of this run are gone",
            got=f"{steps} holds none, and metrics.jsonl has steps up to {last}",
            expected="the checkpoints that the run has saved",
            fix="mount or restore the folder; to start the run again from step 0, delete "
            f"{folder / 'metrics.jsonl'}, or name another checkpoint.folder",
        )


def require_whole(step: int, extra: Mapping[str, Any], config: TrainingConfig) -> None:
    """Raise if what a checkpoint says besides its arrays is not of this run and step.

    Args:
        step: of the checkpoint's arrays.
        extra: what was saved with them.
        config: of the run that would be resumed.
    """
    data = extra.get("data")
    if not isinstance(data, dict) or not isinstance(extra.get("attention"), dict):
        raise CheckpointError(
            f"the checkpoint of step {step} does not say where its data or attention was",
            got=f"a record of {', '.join(sorted(extra)) or 'nothing'}",
            expected="data and attention, as `xsake train` saves them",
            fix=f"move the folder of step {step} away to resume from the step before it",
        )
    if data.get("step") != step:
        raise CheckpointError(
            f"the checkpoint of step {step} contradicts itself: its data is at another step",
            got=f"data at step {data.get('step')}",
            expected=f"data at step {step}",
            fix=f"the record was edited: move the folder of step {step} away to resume from the "
            "step before it",
        )
    if "config" in extra:  # not in those of 0.1.0
        before = TrainingConfig.from_json(json.dumps(extra["config"]))
        require_same_settings(before, config, f"the checkpoint of step {step}")


def _progress(metrics: Path) -> tuple[int, bool]:
    """Return the last step that was done, and whether an attempt ended after its last save."""
    last, has_ended = -1, False
    try:
        with metrics.open("rb") as file:
            for line in map(parsed, file):
                if line is None:
                    continue
                if "event" in line:
                    has_ended |= line.get("ending") in ("done", "stopped")
                elif not line.get("failed_saves"):
                    last = max(last, line["step"])
    except OSError:
        return -1, False
    return last, has_ended
