import pytest

from xsake.certify import bound, tpu
from xsake.certify.family import Peak
from xsake.certify.record import Cost
from xsake.errors import ArgumentError

PEAK = Peak(1e12, 1e9, 2**34, None, "made up")


def cost(flops: int, bytes_read: int, bytes_written: int) -> Cost:
    return Cost(
        listed=1,
        computed=1,
        launches=1,
        steps=1,
        flops=flops,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
    )


def test_the_slower_of_products_and_bytes_bounds_the_time():
    assert bound.lower_bound(cost(3 * 10**12, 10**9, 10**9), PEAK).seconds == 3
    assert bound.lower_bound(cost(10**12, 3 * 10**9, 10**9), PEAK).seconds == 4


def test_a_bound_says_that_it_is_no_measurement():
    label = bound.lower_bound(cost(1, 1, 1), PEAK).label
    assert label == "lower bound from public peak figures, not a measurement"


def test_a_full_chip_bounds_dense_attention_by_its_peak():
    """4 T^2 D flops of one head at 16k tokens and D 128 on v5e: 0.7 ms at 197 Tflop/s."""
    flops = 4 * 16384**2 * 128
    found = bound.lower_bound(cost(flops, 10**6, 10**6), tpu.TARGETS["v5e"].peak)
    assert found.seconds == pytest.approx(6.977e-4, rel=1e-3)


def test_balance_is_the_largest_share_over_the_mean():
    assert bound.balance([50, 50]) == 1
    assert bound.balance([75, 25]) == 1.5
    assert bound.balance([0, 0]) == 1
    with pytest.raises(ArgumentError, match="shares"):
        bound.balance([])


def test_rows_are_dealt_out_whole_and_in_order():
    assert bound.shares_of([5, 2, 1, 1, 4], 2) == [7, 6]
    assert bound.shares_of([9, 1, 1, 1], 2) == [9, 3]
    assert bound.shares_of([1], 2) == [1, 0]
    assert sum(bound.shares_of([3, 1, 4, 1, 5, 9, 2, 6], 3)) == 31
    with pytest.raises(ArgumentError, match="cores"):
        bound.shares_of([1], 0)
