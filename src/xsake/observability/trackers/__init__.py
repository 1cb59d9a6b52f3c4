"""Trackers of others, made when they are asked for; their libraries are extras."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xsake.errors import ArgumentError
from xsake.observability.tracker import MakeTracker, Tracker

__all__ = ["TRACKERS", "Subject", "TrackerName", "make_trackers"]

TrackerName = Literal["wandb", "tensorboard", "trackio"]
TRACKERS: tuple[TrackerName, ...] = ("wandb", "tensorboard", "trackio")


@dataclass(frozen=True)
class Subject:
    """What a tracker is told about the run before it begins.

    Args:
        project: that the run belongs to.
        name: of the run.
        run_id: the same whenever the run is started again.
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


def make_trackers(names: Sequence[str], subject: Subject) -> dict[str, MakeTracker]:
    """What makes each tracker, for `Fan`.

    Args:
        names: of `TRACKERS`.
        subject: the run.
    """
    if unknown := [name for name in names if name not in TRACKERS]:
        raise ArgumentError("there is no such tracker", got=unknown, expected=TRACKERS)
    return {name: functools.partial(_made, name, subject) for name in names}


def _made(name: str, subject: Subject) -> Tracker:
    if name == "wandb":
        from xsake.observability.trackers.wandb import WandbTracker

        return WandbTracker(subject)
    if name == "tensorboard":
        from xsake.observability.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(subject)
    from xsake.observability.trackers.trackio import TrackioTracker

    return TrackioTracker(subject)
