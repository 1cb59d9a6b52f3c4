"""Whom a run tells its metrics beside its own file, as a configuration says it."""

from typing import Annotated

from pydantic import Field

from xsake._schema import Frozen, Number
from xsake.observability.trackers import TrackerName


class TrackSection(Frozen):
    """Trackers beside metrics.jsonl, which is always written."""

    trackers: tuple[TrackerName, ...] = Field(default=(), description="of the extra `trackers`")
    seconds: Annotated[Number, Field(ge=0, le=3600)] = Field(
        default=1.0,
        description="in which quick steps tell trackers only their newest line; 0: every line",
    )
    project: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")] = "xsake"
    is_online: Annotated[bool, Field(strict=True)] = Field(
        default=False, description="whether wandb may use the network; else `wandb sync` does later"
    )
