import pytest

from tests.bench.sample_rows import sample_row
from xsake.bench import Ratio
from xsake.bench.compare import compare_rows
from xsake.bench.measure import PRODUCT


def row(side, median, *, width=0.01, **more):
    low, high = median * (1 - width), median * (1 + width)
    ratio = Ratio(baseline=PRODUCT, median=median, q25=low, q75=high)
    return sample_row(side=side, ratios=(ratio,), **more)


def test_sides_are_held_against_the_product_of_their_own_run():
    before = [row("a", 2.0), row("b", 2.0), row("gone", 1.0)]
    after = [row("a", 2.5), row("b", 2.02), row("new", 1.0)]
    found = {change.side: change for change in compare_rows(before, after)}
    assert set(found) == {"a", "b"}
    assert found["a"].factor.median == pytest.approx(1.25) and found["a"].is_slower(1.1)
    assert not found["b"].is_slower(1.1) and found["b"].is_clear


def test_the_newest_row_counts_and_other_sizes_are_other_sides():
    early, late = "2026-01-01T00:00:00+00:00", "2026-02-01T00:00:00+00:00"
    before = [row("a", 3.0, utc=late), row("a", 1.0, utc=early)]
    (change,) = compare_rows(before, [row("a", 3.0)])
    assert change.factor.median == pytest.approx(1)
    assert not compare_rows(before, [row("a", 3.0, dtype="bfloat16")])


def test_noise_is_not_a_regression():
    (change,) = compare_rows([row("a", 1.0, width=0.4)], [row("a", 1.3, width=0.4)])
    assert not change.is_slower(1.1) and not change.is_clear
