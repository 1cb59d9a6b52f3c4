"""Which tests run with every change (the gate), and which wait for the nightly lane.

The comment behind a `slow` mark names the quicker test of the same behaviour.
"""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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
