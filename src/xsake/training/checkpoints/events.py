"""What a store tells while it works: steps that it set aside or adopted, and saves that failed."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xsake.training.checkpoints.damage import Reason

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Notice:
    """Something that happened to a step and that someone should know.

    Attributes:
        kind: `quarantined`: renamed, nothing of it is deleted; `skipped`: bad, but left where it
            is; `adopted`: committed without a manifest by a run that died, found to be sound, and
            given its manifest now.
        step: its number.
        reason: in one word; None where nothing is wrong.
        detail: in one line, with the file or the leaf.
        path: where it is now.
    """

    kind: Literal["quarantined", "skipped", "adopted"]
    step: int
    reason: Reason | None
    detail: str
    path: Path

    def __str__(self) -> str:
        return f"checkpoint {self.step} was {self.kind} ({self.detail}): {self.path}"


@dataclass(frozen=True)
class SaveFailure:
    """A save that did not work; older steps are as they were.

    Attributes:
        step: that was to be saved.
        what: went wrong, in one line.
        error: as it was raised.
        is_committed: whether the arrays are on the disk all the same: only the manifest could not
            be written, or old steps not be deleted.
    """

    step: int
    what: str
    error: Exception
    is_committed: bool

    def __str__(self) -> str:
        state = "is there, but not finished" if self.is_committed else "was not saved"
        return f"checkpoint {self.step} {state}: {self.what}"


Watch = Callable[[Notice], None]
OnFailure = Callable[[SaveFailure], None]


def log_notice(notice: Notice) -> None:
    """Watch by the log of Python."""
    _LOG.log(logging.INFO if notice.reason is None else logging.ERROR, "%s", notice)


def log_failure(failure: SaveFailure) -> None:
    """Report by the log of Python."""
    _LOG.error("%s", failure)
