"""Tracker settings of a training run."""

from typing import Annotated

from pydantic import Field

from xsake._schema import Frozen, Number
from xsake.observability.trackers import TrackerName


class TrackSection(Frozen):
    """Trackers in addition to metrics.jsonl, which is always written."""

    trackers: tuple[TrackerName, ...] = Field(
        default=(), description="installed by the extra `trackers`"
    )
    min_interval_s: Annotated[Number, Field(ge=0, le=3600)] = Field(
        default=1.0,
        description="trackers get at most one line of fast steps per interval; 0: every line",
    )
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "xsake"
    is_online: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="let wandb use the network; otherwise upload with `wandb sync`"
    )
