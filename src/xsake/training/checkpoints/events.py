"""Events of a checkpoint store: quarantined and repaired steps, failed saves."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xsake.training.checkpoints.damage import DamageReason

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointEvent:
    """Event about one step.

    Attributes:
        kind: `quarantined`: renamed, nothing is deleted; `skipped`: invalid, not renamed;
            `repaired`: valid but without a manifest, because its run died; the manifest was added.
        step: its number.
        reason: kind of damage; None if undamaged.
        detail: one line with the file or the leaf.
        path: current path of the step.
    """

    kind: Literal["quarantined", "skipped", "repaired"]
    step: int
    reason: DamageReason | None
    detail: str
    path: Path

    def __str__(self) -> str:
        return f"checkpoint {self.step} was {self.kind} ({self.detail}): {self.path}"


@dataclass(frozen=True)
class SaveFailure:
    """A save that failed; older steps are unchanged.

    Attributes:
        step: its number.
        what: the problem in one line.
        error: as raised.
        is_committed: whether the arrays were committed; then the manifest or the deletion of old
            steps failed.
    """

    step: int
    what: str
    error: Exception
    is_committed: bool

    def __str__(self) -> str:
        state = "was committed but not finalized" if self.is_committed else "was not saved"
        return f"checkpoint {self.step} {state}: {self.what}"


EventCallback = Callable[[CheckpointEvent], None]
FailureCallback = Callable[[SaveFailure], None]


def log_event(notice: CheckpointEvent) -> None:
    """Log an event."""
    _LOG.log(logging.INFO if notice.reason is None else logging.ERROR, "%s", notice)


def log_failure(failure: SaveFailure) -> None:
    """Log a failed save."""
    _LOG.error("%s", failure)
