"""The quick half of the fault matrix, and bugs that its checks must notice."""

import gc

import pytest

from benchmarks.faults.__main__ import QUICK, measure, notices
from benchmarks.faults.planted import BUGS
from benchmarks.faults.runs import prepare
from tests.lanes import gate


@pytest.fixture(scope="module")
def ground(tmp_path_factory):
    return prepare(tmp_path_factory.mktemp("faults"), is_inside=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", gate(["F3", "F4", "F22"], QUICK))
def test_a_fault_is_survived(ground, number):
    fault = measure(number, ground, is_quick=True)
    assert fault.is_met, fault.row()


# Orbax leaves tasks behind when it reads the damaged files that digests would have kept from it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_noticed(ground, bug):
    is_noticed = notices(bug, ground)
    gc.collect()  # here, not in a later test
    assert is_noticed
