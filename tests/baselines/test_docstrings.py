"""Examples in the docstrings of the baselines run."""

import doctest
import importlib
import pkgutil

import pytest

from benchmarks import baselines

MODULES = [module.name for module in pkgutil.iter_modules(baselines.__path__)]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"benchmarks.baselines.{name}")
    assert doctest.testmod(module).failed == 0
