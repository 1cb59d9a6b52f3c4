"""Implementations that run on this machine; asking for them starts JAX's devices."""

import pytest

from tests.lanes import gate
from xsake.kernels.block_sparse.api import OP

RUNNABLE = [name for name, declined in OP.implementations().items() if declined is None]

# What backends share is tested on one of them every time; conformance always runs them all.
each_implementation = pytest.mark.parametrize("implementation", gate(["xla"], RUNNABLE))
# The native kernels have no float64.
each_in_float64 = pytest.mark.parametrize(
    "implementation", gate(["xla"], [name for name in RUNNABLE if name != "native_cpu"])
)
