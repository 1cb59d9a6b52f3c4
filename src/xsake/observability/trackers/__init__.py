"""Third-party trackers; their libraries are optional."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xsake.errors import ArgumentError
from xsake.observability.tracker import Tracker, TrackerFactory

__all__ = ["TRACKERS", "RunInfo", "TrackerName", "make_trackers"]

TrackerName = Literal["wandb", "tensorboard", "trackio"]
TRACKERS: tuple[TrackerName, ...] = ("wandb", "tensorboard", "trackio")


@dataclass(frozen=True)
class RunInfo:
    """Description of a run for trackers.

    Args:
        project: name of the project.
        name: name of the run.
        run_id: stable across restarts.
        folder: for files of trackers.
        is_online: whether a tracker may use the network.
        settings: of the run, as JSON.
    """

    project: str
    name: str
    run_id: str
    folder: Path
    is_online: bool = False
    settings: str = "{}"


def make_trackers(names: Sequence[str], run: RunInfo) -> dict[str, TrackerFactory]:
    """Return tracker factories for `AsyncTrackers`.

    Args:
        names: of `TRACKERS`.
        run: description of the run.
    """
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ArgumentError("unknown tracker", got=unknown, expected=TRACKERS)
    return {name: functools.partial(_make_tracker, name, run) for name in names}


def _make_tracker(name: str, run: RunInfo) -> Tracker:
    if name == "wandb":
        from xsake.observability.trackers.wandb import WandbTracker

        return WandbTracker(run)
    if name == "tensorboard":
        from xsake.observability.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(run)
    from xsake.observability.trackers.trackio import TrackioTracker

    return TrackioTracker(run)
