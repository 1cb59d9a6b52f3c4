"""Fixed pattern masks: Chunked, Sinks, Strided, Longformer."""

import dataclasses
from types import ModuleType
from typing import Any

from xsake.masks.arrays import UNBOUNDED, Answer, Codes, quotient, remainder, subtract
from xsake.masks.coverage import Rectangles, to_codes
from xsake.masks.parametric import AbstractParametric, store_int


@dataclasses.dataclass(frozen=True)
class Chunked(AbstractParametric):
    """A query attends to the keys of its chunk: `q // size == kv // size`.

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
        store_int(self, "size", min_value=1)

    def _params(self) -> tuple[int, ...]:
        return (self.size,)

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, size: Any) -> Answer:
        return quotient(xp, q, size) == quotient(xp, kv, size)

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, size: Any) -> Codes:
        q_first, q_last, kv_first, kv_last = (quotient(xp, end, size) for end in area)
        empty = (q_last < kv_first) | (kv_last < q_first)
        full = xp.minimum(q_first, kv_first) == xp.maximum(q_last, kv_last)
        return to_codes(empty, full)

    def _extent(self) -> int:
        return min(4 * self.size, UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Sinks(AbstractParametric):
    """Every query attends to the first `count` keys: `kv < count`.

    Args:
        count: number of keys.

    Example:
        >>> print(Sinks(1).to_ascii(2, 4))
        #...
        #...
    """

    count: int

    def __post_init__(self) -> None:
        store_int(self, "count", min_value=0)

    def _params(self) -> tuple[int, ...]:
        return (self.count,)

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, count: Any) -> Answer:
        return kv < count

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, count: Any) -> Codes:
        return to_codes(area.kv_first >= count, area.kv_last < count)

    def _extent(self) -> int:
        return min(max(16, 4 * self.count), UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Strided(AbstractParametric):
    """Every query attends to the first `width` keys of each stride: `kv % stride < width`.

    Args:
        stride: distance between the starts of visible runs.
        width: number of visible keys per stride; at most `stride`.

    Example:
        >>> print(Strided(4).to_ascii(2, 8))
        #...#...
        #...#...
    """

    stride: int
    width: int = 1

    def __post_init__(self) -> None:
        store_int(self, "stride", min_value=1)
        store_int(self, "width", min_value=1, max_value=self.stride)

    def _params(self) -> tuple[int, ...]:
        return self.stride, self.width

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, stride: Any, width: Any) -> Answer:
        return remainder(xp, kv, stride) < width

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, stride: Any, width: Any) -> Codes:
        start = remainder(xp, area.kv_first, stride)
        steps = area.kv_last - area.kv_first
        # The visible keys form runs of `width`; with width == stride there are no gaps.
        full = (steps < width - start) | (width == stride)
        empty = (start >= width) & (steps < stride - start)
        return to_codes(empty, full)

    def _extent(self) -> int:
        return min(max(16, 4 * self.stride), UNBOUNDED)


@dataclasses.dataclass(frozen=True)
class Longformer(AbstractParametric):
    """Sliding window plus global tokens, which attend to all and are attended by all.

    `|q - kv| <= window`, or `kv < global_tokens`, or `q < global_tokens`. Combine with
    `Causal()` for decoders.

    Args:
        window: number of positions on each side of the query.
        global_tokens: number of leading positions that are global.

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
        store_int(self, "window", min_value=0)
        store_int(self, "global_tokens", min_value=0)

    def _params(self) -> tuple[int, ...]:
        return self.window, self.global_tokens

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, window: Any, global_tokens: Any) -> Answer:
        near = (subtract(kv, window) <= q) & (subtract(q, window) <= kv)
        return near | (kv < global_tokens) | (q < global_tokens)

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, window: Any, global_tokens: Any) -> Codes:
        q_first, q_last, kv_first, kv_last = area
        empty = (
            (q_first >= global_tokens)
            & (kv_first >= global_tokens)
            & ((subtract(kv_first, window) > q_last) | (subtract(q_first, window) > kv_last))
        )
        # The rectangle without its global rows and columns must be inside the window.
        q_first = xp.maximum(q_first, global_tokens)
        kv_first = xp.maximum(kv_first, global_tokens)
        all_global = (q_first > q_last) | (kv_first > kv_last)
        all_near = (subtract(kv_last, window) <= q_first) & (subtract(q_last, window) <= kv_first)
        return to_codes(empty, all_global | all_near)

    def _extent(self) -> int:
        return min(max(16, 4 * max(self.window, self.global_tokens)), UNBOUNDED)
