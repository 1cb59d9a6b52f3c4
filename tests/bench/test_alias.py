"""`xsake.bench`, the name of 0.1.0, gives the same objects."""

import pytest

import xsake.bench
from xsake import benchmarking
from xsake.bench.tuned_file import load_tuned_tiles
from xsake.benchmarking import tuning


def test_old_names_are_the_new_ones():
    assert xsake.bench.BenchmarkRow is benchmarking.BenchmarkRow
    assert load_tuned_tiles is tuning.load_tuned_tiles
    with pytest.raises(AttributeError, match="nothing"):
        xsake.bench.nothing  # noqa: B018 (raises)
