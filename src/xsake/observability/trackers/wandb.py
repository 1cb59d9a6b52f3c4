"""Weights & Biases; offline unless the run's configuration allows network access."""

import json
from collections.abc import Mapping
from typing import Any

from xsake.errors import MissingExtraError
from xsake.observability.trackers import RunInfo


class WandbTracker:
    """A W&B run; offline runs are stored in the run's folder for `wandb sync`.

    Args:
        run: description of the run.
    """

    def __init__(self, run: RunInfo):
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "wandb is not installed", fix="pip install 'xsake[trackers]'"
            ) from error
        run.folder.mkdir(parents=True, exist_ok=True)
        # A restored run logs steps again, which W&B's own step counter rejects.
        self._run: Any = wandb.init(
            project=run.project, name=run.name, id=run.run_id, resume="allow",
            dir=str(run.folder), config=json.loads(run.settings),
            mode="online" if run.is_online else "offline",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True,
                x_disable_stats=True,
            ),
        )  # fmt: skip
        self._run.define_metric("training_step")
        self._run.define_metric("*", step_metric="training_step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """See `Tracker`."""
        self._run.log({**values, "training_step": step})

    def finish(self) -> None:
        """See `Tracker`."""
        self._run.finish()
