"""Lower bounds on time from public peak figures."""

from xsake.certify.family import PeakFigures
from xsake.certify.record import PassCost, TimeBound

LABEL = "lower bound from public peak figures, not a measurement"


def lower_bound(cost: PassCost, peak: PeakFigures) -> TimeBound | None:
    """Return a lower bound of the time of a pass; None if its work is not known statically.

    `seconds = max(flops of listed blocks / peak flops, every array once / peak bandwidth)`.
    The bf16 peak also bounds float32 products. Repeated reads count once, because the compiler may
    keep operands in fast memory.

    Args:
        cost: work of the pass.
        peak: public figures of one device.

    Returns:
        Seconds and a description of the bound.

    Example:
        >>> cost = PassCost(
        ...     listed=1, computed=2, launches=1, steps=1, balance=1.0, flops=4 * 10**12,
        ...     bytes_read=3 * 10**9, bytes_written=10**9, least_bytes=10**9)
        >>> lower_bound(cost, PeakFigures(1e12, 1e9, 2**34, None, "an example"))
        TimeBound(seconds=2.0, label='lower bound from public peak figures, not a measurement')
    """
    if cost.computed is None:
        return None
    flops = cost.flops * cost.listed / max(cost.computed, 1)
    moving = cost.least_bytes / peak.hbm_bytes_per_second
    return TimeBound(seconds=max(flops / peak.bf16_flops_per_second, moving), label=LABEL)
