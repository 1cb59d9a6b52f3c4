"""What a run tells while it goes: progress for a screen, and an alarm while saves fail."""

from collections.abc import Callable
from dataclasses import dataclass

from xsake.training.checkpoints import CheckpointStore, SaveFailure
from xsake.training.checkpoints.events import log_failure


@dataclass(frozen=True)
class Progress:
    """A step is done: told to whoever watches.

    Args:
        step: its number, from 0.
        steps: of the whole run.
        loss: mean over the batch, nats per token.
        gradient_norm: before clipping.
        learning_rate: of the update.
        is_skipped: whether the guard refused the update.
        budget: computed / visible blocks of attention; None for a mask.
        tokens_per_second: since the last line that was told.
        remaining_seconds: to go, at that speed.
        note: what else happened, such as an evaluation.
    """

    step: int
    steps: int
    loss: float
    gradient_norm: float
    learning_rate: float
    is_skipped: bool
    budget: float | None
    tokens_per_second: float
    remaining_seconds: float
    note: str = ""


Watch = Callable[[Progress], None]


class SaveAlarm:
    """Rings while saves fail: how many did since the last one that did not."""

    def __init__(self) -> None:
        self._failures, self._last = 0, -1

    def ring(self, failure: SaveFailure) -> None:
        """A save has failed; told by the thread that saves.

        Args:
            failure: what the store says about it.
        """
        self._failures, self._last = self._failures + 1, failure.step
        log_failure(failure)

    def count(self, store: CheckpointStore) -> int:
        """Saves that failed, 0 again as soon as a later step is there.

        Args:
            store: that saves.
        """
        if self._failures and max(store.steps(), default=-1) > self._last:
            self._failures = 0
        return self._failures
