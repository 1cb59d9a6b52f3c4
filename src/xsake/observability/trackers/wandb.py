"""Weights & Biases: offline unless the settings of the run allow the network."""

import json
from collections.abc import Mapping
from typing import Any

from xsake.errors import MissingExtraError
from xsake.observability.trackers import Subject


class WandbTracker:
    """A run of W&B; offline ones lie in the run's folder, for `wandb sync`.

    Args:
        subject: the run.
    """

    def __init__(self, subject: Subject):
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError(
                "wandb is not installed", fix="pip install 'xsake[trackers]'"
            ) from error
        subject.folder.mkdir(parents=True, exist_ok=True)
        # A run that goes back logs steps again, which W&B's own counter would refuse.
        self._run: Any = wandb.init(
            project=subject.project, name=subject.name, id=subject.run_id, resume="allow",
            dir=str(subject.folder), config=json.loads(subject.settings),
            mode="online" if subject.is_online else "offline",
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
