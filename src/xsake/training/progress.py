"""Progress events of a run, and a counter of failed saves."""

from collections.abc import Callable
from dataclasses import dataclass

from xsake.training.checkpoints import CheckpointStore, SaveFailure
from xsake.training.checkpoints.events import log_failure


@dataclass(frozen=True)
class TrainingProgress:
    """Progress event passed to the callback.

    Args:
        step: number of the finished step, from 0.
        steps: of the whole run.
        loss: mean over the batch, nats per token.
        gradient_norm: before clipping.
        learning_rate: of the update.
        is_skipped: whether the update was skipped.
        budget: computed / visible blocks of attention; None for a mask.
        tokens_per_second: since the previous event.
        remaining_seconds: estimate at this speed.
        note: other events, such as an evaluation.
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


ProgressCallback = Callable[[TrainingProgress], None]


class SaveFailureCounter:
    """Count of failed saves since the last successful one."""

    def __init__(self) -> None:
        self._failures, self._last = 0, -1

    def record_failure(self, failure: SaveFailure) -> None:
        """Count and log a failed save; called by the saving thread.

        Args:
            failure: from the store.
        """
        self._failures, self._last = self._failures + 1, failure.step
        log_failure(failure)

    def count(self, store: CheckpointStore) -> int:
        """Return the number of failed saves; a later committed step resets it to 0.

        Args:
            store: of the run.
        """
        if self._failures and max(store.steps(), default=-1) > self._last:
            self._failures = 0
        return self._failures
