import pytest

from tests.bench.sample_rows import sample_row
from xsake.benchmarking import Shape
from xsake.benchmarking.growth import fit_growth, fit_growths
from xsake.benchmarking.rows import TimingStats
from xsake.errors import ArgumentError


def timed(side, tokens, seconds):
    timing = TimingStats(median=seconds, q25=seconds, q75=seconds)
    return sample_row(side=side, shape=Shape.square(tokens), seconds=timing)


def test_each_side_gets_its_own_exponent_and_lines_cross_where_they_are_equal():
    rows = [timed("dense", n, 1e-9 * n**2) for n in (256, 512, 1024)]
    rows += [timed("sparse", n, 1e-7 * n) for n in (256, 512, 1024)]
    rows += [timed("seen once", 256, 1.0)]
    dense, sparse = fit_growths(rows)
    assert (dense.exponent, sparse.exponent) == (pytest.approx(2), pytest.approx(1))
    assert dense.crossover(sparse) == sparse.crossover(dense) == pytest.approx(100)
    assert dense.crossover(dense) is None


def test_what_does_not_fit_is_told():
    assert fit_growth("bent", (1, 2, 4), (1.0, 4.0, 4.0)).largest_residual > 0.3
    with pytest.raises(ArgumentError, match="XSK-102.fit-lengths"):
        fit_growth("point", (8, 8), (1.0, 1.0))
