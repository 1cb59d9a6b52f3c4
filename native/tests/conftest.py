"""Import path of the helpers next to the tests, and the length of the fuzzer."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


def pytest_addoption(parser):
    parser.addoption("--layouts", type=int, default=10, help="fuzzed layouts of each of 10 shapes")


@pytest.fixture
def num_layouts(request):
    """Number of random layouts of one shape."""
    return request.config.getoption("--layouts")
