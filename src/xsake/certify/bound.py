"""Lower bounds on time from public peak figures, and balance of work over cores."""

from collections.abc import Sequence

import numpy as np

from xsake.certify.family import Peak
from xsake.certify.record import Bound, Cost
from xsake.errors import ArgumentError

LABEL = "lower bound from public peak figures, not a measurement"


def lower_bound(cost: Cost, peak: Peak) -> Bound:
    """The time below which no such device can run a pass.

    `seconds = max(flops / peak flops, bytes / peak bandwidth)`. Products of float32 take longer
    than the bf16 peak says, so it bounds them too. Between the memory of a TPU and its cores there
    is no cache, so a block that is read for two steps is moved twice.

    Args:
        cost: what the pass computes and moves.
        peak: public figures of one device.

    Returns:
        Seconds, and in words what kind of number they are.

    Example:
        >>> cost = Cost(listed=1, computed=1, launches=1, steps=1, flops=2 * 10**12,
        ...             bytes_read=3 * 10**9, bytes_written=10**9)
        >>> lower_bound(cost, Peak(1e12, 1e9, 2**34, None, "an example"))
        Bound(seconds=4.0, label='lower bound from public peak figures, not a measurement')
    """
    moved = cost.bytes_read + cost.bytes_written
    seconds = max(cost.flops / peak.bf16_flops_per_second, moved / peak.hbm_bytes_per_second)
    return Bound(seconds=seconds, label=LABEL)


def balance(shares: Sequence[int]) -> float:
    """How unevenly cores are loaded: the largest share over the mean; 1 is even.

    Args:
        shares: steps of each core.

    Example:
        >>> balance([60, 40])
        1.2
    """
    if not shares or min(shares) < 0:
        raise ArgumentError("No such shares.", got=list(shares), expected="one count >= 0 per core")
    total = sum(shares)
    return 1.0 if total == 0 else max(shares) * len(shares) / total


def shares_of(row_steps: Sequence[int], cores: int) -> list[int]:
    """Steps of each core if rows are dealt out in order, in runs of about equal length.

    A row belongs to the core in whose equal part of the list it begins.

    Args:
        row_steps: grid steps of each row of the list, in order.
        cores: how many share the list.

    Example:
        >>> shares_of([5, 2, 1, 1, 4], 2)
        [7, 6]
    """
    if cores < 1:
        raise ArgumentError("No such number of cores.", got=cores, expected="at least 1")
    steps = np.asarray(row_steps, np.int64)
    share = -(-int(steps.sum()) // cores) or 1
    core = np.minimum((np.cumsum(steps) - steps) // share, cores - 1)
    return [int(steps[core == number].sum()) for number in range(cores)]
