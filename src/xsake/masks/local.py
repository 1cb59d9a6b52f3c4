"""Band masks around the diagonal: Full, Causal, Window."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from xsake.masks.arrays import UNBOUNDED, Answer, Codes, subtract
from xsake.masks.coverage import Rectangles, to_codes
from xsake.masks.parametric import AbstractParametric, store_int


def _has_no_limit(limit: Any) -> bool:
    return isinstance(limit, int) and limit >= UNBOUNDED


class AbstractBand(AbstractParametric):
    """`q - left <= kv <= q + right`, with parameters (left, right).

    The rules subtract from positions and never add, so int32 cannot overflow.
    """

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, left: Any, right: Any) -> Answer:
        allowed = np.True_
        if not _has_no_limit(right):
            allowed = subtract(kv, right) <= q
        if not _has_no_limit(left):
            allowed = allowed & (subtract(q, left) <= kv)
        return allowed

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, left: Any, right: Any) -> Codes:
        empty, full = np.False_, np.True_
        if not _has_no_limit(right):
            empty = subtract(area.kv_first, right) > area.q_last
            full = subtract(area.kv_last, right) <= area.q_first
        if not _has_no_limit(left):
            empty = empty | (subtract(area.q_first, left) > area.kv_last)
            full = full & (subtract(area.q_last, left) <= area.kv_first)
        return to_codes(empty, full)


@dataclasses.dataclass(frozen=True)
class Full(AbstractBand):
    """Every query attends to every key.

    Example:
        >>> bool(Full().allows(0, 7))
        True
    """

    def _params(self) -> tuple[int, int]:
        return UNBOUNDED, UNBOUNDED


@dataclasses.dataclass(frozen=True)
class Causal(AbstractBand):
    """A query attends to keys up to its own position: `kv <= q`.

    Example:
        >>> bool(Causal().allows(3, 3)), bool(Causal().allows(3, 4))
        (True, False)
    """

    def _params(self) -> tuple[int, int]:
        return UNBOUNDED, 0


@dataclasses.dataclass(frozen=True)
class Window(AbstractBand):
    """Sliding window of `left` keys before and `right` after: `q-left <= kv <= q+right`.

    Args:
        left: number of positions before the query; None for all.
        right: number of positions after the query; None for all.

    Example:
        >>> print(Window(left=1, right=0).to_ascii(4))
        #...
        ##..
        .##.
        ..##
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) is not None:
                store_int(self, name, min_value=0)

    def _params(self) -> tuple[int, int]:
        left = UNBOUNDED if self.left is None else self.left
        right = UNBOUNDED if self.right is None else self.right
        return left, right

    def _extent(self) -> int:
        return min(max(16, 4 * max(self.left or 0, self.right or 0)), UNBOUNDED)
