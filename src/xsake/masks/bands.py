"""Owns the masks that are a band around the diagonal: Full, Causal, Window."""

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np

from xsake.masks.arrays import UNBOUNDED, Answer, Codes, reduced
from xsake.masks.coverage import Rectangles, codes
from xsake.masks.structured import AbstractStructured, store_int


def _is_unbounded(limit: Any) -> bool:
    return isinstance(limit, int) and limit >= UNBOUNDED


class AbstractBand(AbstractStructured):
    """`q - left <= kv <= q + right`; its numbers are (left, right).

    The formulas subtract from positions and never add, so int32 cannot overflow.
    """

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, left: Any, right: Any) -> Answer:
        allowed = np.True_
        if not _is_unbounded(right):
            allowed = reduced(kv, right) <= q
        if not _is_unbounded(left):
            allowed = allowed & (reduced(q, left) <= kv)
        return allowed

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, left: Any, right: Any) -> Codes:
        none, every = np.False_, np.True_
        if not _is_unbounded(right):
            none = reduced(area.kv_first, right) > area.q_last
            every = reduced(area.kv_last, right) <= area.q_first
        if not _is_unbounded(left):
            none = none | (reduced(area.q_first, left) > area.kv_last)
            every = every & (reduced(area.q_last, left) <= area.kv_first)
        return codes(none, every)


@dataclasses.dataclass(frozen=True)
class Full(AbstractBand):
    """Every query sees every key.

    Example:
        >>> bool(Full().allows(0, 7))
        True
    """

    def _numbers(self) -> tuple[int, int]:
        return UNBOUNDED, UNBOUNDED


@dataclasses.dataclass(frozen=True)
class Causal(AbstractBand):
    """A query sees the keys up to its own position: `kv <= q`.

    Example:
        >>> bool(Causal().allows(3, 3)), bool(Causal().allows(3, 4))
        (True, False)
    """

    def _numbers(self) -> tuple[int, int]:
        return UNBOUNDED, 0


@dataclasses.dataclass(frozen=True)
class Window(AbstractBand):
    """A query sees itself, `left` keys before it and `right` after it: `q-left <= kv <= q+right`.

    Args:
        left: how many positions before the query; None for all of them.
        right: how many positions after the query; None for all of them.

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
                store_int(self, name, least=0)

    def _numbers(self) -> tuple[int, int]:
        left = UNBOUNDED if self.left is None else self.left
        right = UNBOUNDED if self.right is None else self.right
        return left, right

    def _extent(self) -> int:
        return min(max(16, 4 * max(self.left or 0, self.right or 0)), UNBOUNDED)
