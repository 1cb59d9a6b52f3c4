"""Progress events of long computations."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress event, passed to the `on_progress` callback of a computation.

    Args:
        done, total: numbers of finished and of all items.
        label: the last item, or the current activity.
        is_new: False for a cached result.
        elapsed_seconds: since the start; None if it is not measured.
        remaining_seconds: estimate; None while unknown.
        detail: result of the item.
        is_failure: whether that result is a failure.
    """

    done: int
    total: int
    label: str
    is_new: bool = True
    elapsed_seconds: float | None = None
    remaining_seconds: float | None = None
    detail: str = ""
    is_failure: bool = False


ProgressFn = Callable[[Progress], None]
