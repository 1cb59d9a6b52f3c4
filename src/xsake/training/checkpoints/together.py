"""What the processes of a run decide together; in a run of one process nothing is exchanged."""

import jax
import numpy as np
from jax.experimental import multihost_utils

from xsake.training.checkpoints import orbax_io


def is_first() -> bool:
    """Whether this process is the one that writes what only one may write."""
    return jax.process_index() == 0


def first_says(number: int) -> int:
    """The number that the first process gave; all of them call this at the same point."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def all_say(is_well: bool) -> bool:
    """Whether every process said yes; all of them call this at the same point."""
    if jax.process_count() == 1:
        return is_well
    return bool(np.all(multihost_utils.process_allgather(np.int32(is_well))))


def meet(name: str) -> None:
    """Wait for all processes, in a thread beside training.

    Args:
        name: of this meeting; no two have the same.
    """
    if jax.process_count() > 1:
        orbax_io.meet(name)
