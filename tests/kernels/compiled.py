"""Calls of conformance cases, compiled once for all tests that differ in data only."""

import functools
from collections.abc import Callable
from typing import Any

import jax

import xsake
from xsake.testing.cases import ConformanceCase
from xsake.testing.conformance import bind, with_gradients


@functools.lru_cache(maxsize=64)
def compiled(case: ConformanceCase, implementation: str) -> Callable[..., Any]:
    """The jitted call of a case with all gradients, for `xsake.testing.conformance.call`."""
    return jax.jit(with_gradients(bind(xsake.attention, case, implementation)))
