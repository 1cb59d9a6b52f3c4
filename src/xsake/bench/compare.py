"""Two files of rows beside each other: which sides became slower, measured against their own runs.

Times of two runs cannot be compared: the machine was another one, or busy. Each run times the same
bare product, so what is compared is a side's time over that product's, run by run.
"""

import dataclasses
from collections.abc import Iterable

from xsake.bench.measure import PRODUCT
from xsake.bench.rows import BenchmarkRow
from xsake.bench.runner import CLEAR_SPREAD, Spread

Key = tuple[str, str, str, str, str]


@dataclasses.dataclass(frozen=True)
class Change:
    """One side in both files.

    Attributes:
        experiment, side, size: which.
        before, after: its time over that of a bare product of as many flops.
    """

    experiment: str
    side: str
    size: str
    before: Spread
    after: Spread

    @property
    def factor(self) -> Spread:
        """Time after / time before, with quartiles as far apart as both runs allow."""
        return Spread(
            self.after.median / self.before.median,
            self.after.q25 / self.before.q75,
            self.after.q75 / self.before.q25,
        )

    def is_slower(self, limit: float) -> bool:
        """Whether even the better quartile is above the limit."""
        return self.factor.q25 > limit

    @property
    def is_clear(self) -> bool:
        """Whether both runs were steady enough to say anything."""
        return max(self.before.relative, self.after.relative) <= CLEAR_SPREAD


def changes(before: Iterable[BenchmarkRow], after: Iterable[BenchmarkRow]) -> list[Change]:
    """Sides that both have, the newest row of each, in the order of `after`."""
    old, new = _newest(before), _newest(after)
    return [
        Change(key[0], key[1], f"{key[2]}, {key[4]}", old[key], new[key])
        for key in new
        if key in old
    ]


def _newest(rows: Iterable[BenchmarkRow]) -> dict[Key, Spread]:
    found: dict[Key, Spread] = {}
    for row in sorted(rows, key=lambda row: row.utc):
        if row.seconds is not None and any(x.baseline == PRODUCT for x in row.ratios):
            shape = row.shape
            size = f"{shape.kv_tokens} tokens, {shape.q_heads}/{shape.kv_heads} x {shape.head_dim}"
            key = row.experiment, row.side, size, row.direction, row.dtype
            found[key] = row.ratio_to(PRODUCT)
    return found
