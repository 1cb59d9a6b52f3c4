"""Owns the masks that are fixed patterns of positions: Chunked, Sinks, Strided, Longformer."""

import dataclasses
from types import ModuleType
from typing import Any

from xsake.masks.arrays import UNBOUNDED, Answer, Codes, quotient, reduced, remainder
from xsake.masks.coverage import Rectangles, codes
from xsake.masks.structured import AbstractStructured, store_int


@dataclasses.dataclass(frozen=True)
class Chunked(AbstractStructured):
    """A query sees the keys of its own chunk: `q // size == kv // size`.

    Args:
        size: positions per chunk.

    Example:
        >>> print(Chunked(2).to_ascii(4))
        ##..
        ##..
        ..##
        ..##
    """

    size: int

    def __post_init__(self) -> None:
        store_int(self, "size", least=1)

    def _numbers(self) -> tuple[int, ...]:
        return (self.size,)

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, size: Any) -> Answer:
        return quotient(xp, q, size) == quotient(xp, kv, size)

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, size: Any) -> Codes:
        q_first, q_last, kv_first, kv_last = (quotient(xp, end, size) for end in area)
        none = (q_last < kv_first) | (kv_last < q_first)
        every = xp.minimum(q_first, kv_first) == xp.maximum(q_last, kv_last)
        return codes(none, every)

    def _extent(self) -> int:
        return min(4 * self.size, UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Sinks(AbstractStructured):
    """Every query sees the first `count` keys: `kv < count`.

    Args:
        count: how many keys.

    Example:
        >>> print(Sinks(1).to_ascii(2, 4))
        #...
        #...
    """

    count: int

    def __post_init__(self) -> None:
        store_int(self, "count", least=0)

    def _numbers(self) -> tuple[int, ...]:
        return (self.count,)

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, count: Any) -> Answer:
        return kv < count

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, count: Any) -> Codes:
        return codes(area.kv_first >= count, area.kv_last < count)

    def _extent(self) -> int:
        return min(max(16, 4 * self.count), UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Strided(AbstractStructured):
    """Every query sees the first `width` keys of each `stride`: `kv % stride < width`.

    Args:
        stride: distance between the starts of visible keys.
        width: how many keys are visible from each start on; at most `stride`.

    Example:
        >>> print(Strided(4).to_ascii(2, 8))
        #...#...
        #...#...
    """

    stride: int
    width: int = 1

    def __post_init__(self) -> None:
        store_int(self, "stride", least=1)
        store_int(self, "width", least=1, most=self.stride)

    def _numbers(self) -> tuple[int, ...]:
        return self.stride, self.width

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, stride: Any, width: Any) -> Answer:
        return remainder(xp, kv, stride) < width

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, stride: Any, width: Any) -> Codes:
        start = remainder(xp, area.kv_first, stride)
        steps = area.kv_last - area.kv_first
        # The visible keys form runs of `width`, unless they touch and leave no gap at all.
        every = (steps < width - start) | (width == stride)
        none = (start >= width) & (steps < stride - start)
        return codes(none, every)

    def _extent(self) -> int:
        return min(max(16, 4 * self.stride), UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Longformer(AbstractStructured):
    """A window plus global tokens that see all and are seen by all.

    `|q - kv| <= window`, or `kv < global_tokens`, or `q < global_tokens`. Combine with
    `Causal()` for decoders.

    Args:
        window: positions to each side of the query, itself not counted.
        global_tokens: how many of the first positions are global.

    Example:
        >>> print(Longformer(window=1, global_tokens=1).to_ascii(5))
        #####
        ###..
        ####.
        #.###
        #..##
    """

    window: int
    global_tokens: int

    def __post_init__(self) -> None:
        store_int(self, "window", least=0)
        store_int(self, "global_tokens", least=0)

    def _numbers(self) -> tuple[int, ...]:
        return self.window, self.global_tokens

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, window: Any, global_tokens: Any) -> Answer:
        near = (reduced(kv, window) <= q) & (reduced(q, window) <= kv)
        return near | (kv < global_tokens) | (q < global_tokens)

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, window: Any, global_tokens: Any) -> Codes:
        q_first, q_last, kv_first, kv_last = area
        none = (
            (q_first >= global_tokens)
            & (kv_first >= global_tokens)
            & ((reduced(kv_first, window) > q_last) | (reduced(q_first, window) > kv_last))
        )
        # What is left of the rectangle without its global rows and columns must be near.
        q_first = xp.maximum(q_first, global_tokens)
        kv_first = xp.maximum(kv_first, global_tokens)
        all_global = (q_first > q_last) | (kv_first > kv_last)
        all_near = (reduced(kv_last, window) <= q_first) & (reduced(q_last, window) <= kv_first)
        return codes(none, all_global | all_near)

    def _extent(self) -> int:
        return min(max(16, 4 * max(self.window, self.global_tokens)), UNBOUNDED)
