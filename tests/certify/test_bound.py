import pytest

from xsake.certify import bound, tpu
from xsake.certify.family import PeakFigures
from xsake.certify.record import PassCost

PEAK = PeakFigures(1e12, 1e9, 2**34, None, "made up")


def cost(flops: int, least_bytes: int, computed: int | None = 1) -> PassCost:
    return PassCost(
        listed=1,
        computed=computed,
        launches=1,
        steps=1,
        balance=1.0,
        flops=flops,
        bytes_read=10**12,
        bytes_written=10**12,
        least_bytes=least_bytes,
    )


def test_the_slower_of_products_and_bytes_bounds_the_time():
    assert bound.lower_bound(cost(3 * 10**12, 2 * 10**9), PEAK).seconds == 3
    assert bound.lower_bound(cost(10**12, 4 * 10**9), PEAK).seconds == 4


def test_only_what_was_asked_for_counts():
    assert bound.lower_bound(cost(4 * 10**12, 0, computed=2), PEAK).seconds == 2
    assert bound.lower_bound(cost(4 * 10**12, 0, computed=None), PEAK) is None


def test_a_bound_says_that_it_is_no_measurement():
    label = bound.lower_bound(cost(1, 1), PEAK).label
    assert label == "lower bound from public peak figures, not a measurement"


def test_a_full_chip_bounds_dense_attention_by_its_peak():
    """4 T^2 D flops of one head at 16k tokens and D 128 on v5e: 0.7 ms at 197 Tflop/s."""
    flops = 4 * 16384**2 * 128
    found = bound.lower_bound(cost(flops, 10**6), tpu.TARGETS["v5e"].peak)
    assert found.seconds == pytest.approx(6.977e-4, rel=1e-3)
