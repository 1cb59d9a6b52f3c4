"""The quick half of the fault matrix: real runs, damaged, poisoned, stopped and started twice."""

import pytest

from benchmarks.faults.__main__ import QUICK, measure
from benchmarks.faults.runs import prepare


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("faults"), is_inside=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", QUICK)
def test_a_fault_is_survived(ground, number):
    fault = measure(number, ground, is_quick=True)
    assert fault.is_met, fault.row()
