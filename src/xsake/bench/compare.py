"""Comparison of two files of rows: which sides became slower relative to a matrix product.

Absolute times of two runs are not comparable: machine and load differ. Every run times the same
matrix product, so each side is compared by its time over that product's.
"""

import dataclasses
from collections.abc import Iterable

from xsake.bench.measure import PRODUCT
from xsake.bench.rows import BenchmarkRow
from xsake.bench.runner import CLEAR_SPREAD, Spread

Key = tuple[str, str, str, str, str]


@dataclasses.dataclass(frozen=True)
class TimeChange:
    """One side in both files."""

    experiment: str
    side: str
    size: str
    before: Spread
    after: Spread

    @property
    def factor(self) -> Spread:
        """Time after / time before, with the quartiles of both runs combined."""
        return Spread(
            self.after.median / self.before.median,
            self.after.q25 / self.before.q75,
            self.after.q75 / self.before.q25,
        )

    def is_slower(self, limit: float) -> bool:
        """Return whether the lower quartile is above the limit."""
        return self.factor.q25 > limit

    @property
    def is_clear(self) -> bool:
        """Whether the spread of both runs is small enough for a comparison."""
        return max(self.before.relative, self.after.relative) <= CLEAR_SPREAD


def compare_rows(before: Iterable[BenchmarkRow], after: Iterable[BenchmarkRow]) -> list[TimeChange]:
    """Compare the newest rows of the sides that both files have, in the order of `after`."""
    old, new = _newest(before), _newest(after)
    return [
        TimeChange(key[0], key[1], f"{key[2]}, {key[4]}", old[key], new[key])
        for key in new
        if key in old
    ]


def _newest(rows: Iterable[BenchmarkRow]) -> dict[Key, Spread]:
    newest: dict[Key, Spread] = {}
    for row in sorted(rows, key=lambda row: row.utc):
        if row.seconds is not None and any(x.baseline == PRODUCT for x in row.ratios):
            shape = row.shape
            size = f"{shape.kv_tokens} tokens, {shape.q_heads}/{shape.kv_heads} x {shape.head_dim}"
            key = row.experiment, row.side, size, row.direction, row.dtype
            newest[key] = row.ratio_to(PRODUCT)
    return newest
