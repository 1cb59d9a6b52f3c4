"""Which tests run with every change (the gate), and which wait for the nightly lane.

The comment behind a `slow` mark names the quicker test of the same behaviour.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from xsake.kernels.block_sparse.api import OP

RUNNABLE = [name for name, declined in OP.implementations().items() if declined is None]


def slow(*row: Any) -> Any:
    """A row of a parametrization for the nightly lane."""
    return pytest.param(*row, marks=pytest.mark.slow)


def gate(names: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """The rows (values, or objects with a name); all but those named are marked slow.

    A row is named if it has something that no cheaper row has.
    """
    rows = list(rows)
    known = [getattr(row, "name", row) for row in rows]
    unknown = [name for name in names if name not in known]
    assert not unknown, f"no such rows: {unknown}"
    return [row if name in names else slow(row) for name, row in zip(known, rows, strict=True)]


# What backends share is tested on one of them every time; conformance always runs them all.
each_implementation = pytest.mark.parametrize("implementation", gate(["xla"], RUNNABLE))
# The native kernels have no float64.
each_in_float64 = pytest.mark.parametrize(
    "implementation", gate(["xla"], [name for name in RUNNABLE if name != "native_cpu"])
)
