"""Lower bounds on time from public peak figures."""

from xsake.certify.family import Peak
from xsake.certify.record import Bound, Cost

LABEL = "lower bound from public peak figures, not a measurement"


def lower_bound(cost: Cost, peak: Peak) -> Bound | None:
    """The time below which no such device can run a pass; None if its work is not known yet.

    `seconds = max(flops of listed blocks / peak flops, every array once / peak bandwidth)`.
    Products of float32 take longer than the bf16 peak says, so it bounds them too. What a kernel
    reads twice counts once, because a compiler may have put it into fast memory before.

    Args:
        cost: what the pass computes and moves.
        peak: public figures of one device.

    Returns:
        Seconds, and in words what kind of number they are.

    Example:
        >>> cost = Cost(listed=1, computed=2, launches=1, steps=1, balance=1.0, flops=4 * 10**12,
        ...             bytes_read=3 * 10**9, bytes_written=10**9, least_bytes=10**9)
        >>> lower_bound(cost, Peak(1e12, 1e9, 2**34, None, "an example"))
        Bound(seconds=2.0, label='lower bound from public peak figures, not a measurement')
    """
    if cost.computed is None:
        return None
    flops = cost.flops * cost.listed / max(cost.computed, 1)
    moving = cost.least_bytes / peak.hbm_bytes_per_second
    return Bound(seconds=max(flops / peak.bf16_flops_per_second, moving), label=LABEL)
