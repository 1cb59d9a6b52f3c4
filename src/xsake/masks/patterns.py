"""Masks defined by a few numbers: bands, chunks, sinks, strides, global tokens, random cells.

A new mask is added to `PARAMETRIC` below, for `parse` and `from_dict`, and to `masks/__init__.py`.
"""

import dataclasses
import itertools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xsake.errors import MaskError
from xsake.masks.base import AbstractParametric, store_int
from xsake.masks.coverage import (
    ALL,
    NONE,
    UNBOUNDED,
    Answer,
    Codes,
    Rectangles,
    quotient,
    remainder,
    subtract,
    to_codes,
    unite,
)

HASH_BITS = 30  # hash and thresholds of Random, including 2**30, fit int32
GOLDEN = np.uint32(0x9E3779B9)  # 2**32 / golden ratio


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
        left, right = (UNBOUNDED if x is None else x for x in (self.left, self.right))
        return left, right


@dataclasses.dataclass(frozen=True)
class Chunked(AbstractParametric):
    """A query attends to the keys of its chunk: `q // size == kv // size`.

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

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, size: Any) -> Answer:
        return quotient(xp, q, size) == quotient(xp, kv, size)

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, size: Any) -> Codes:
        q_first, q_last, kv_first, kv_last = (quotient(xp, end, size) for end in area)
        empty = (q_last < kv_first) | (kv_last < q_first)
        full = xp.minimum(q_first, kv_first) == xp.maximum(q_last, kv_last)
        return to_codes(empty, full)


@dataclasses.dataclass(frozen=True)
class Sinks(AbstractParametric):
    """Every query attends to the first `count` keys: `kv < count`.

    Example:
        >>> print(Sinks(1).to_ascii(2, 4))
        #...
        #...
    """

    count: int

    def __post_init__(self) -> None:
        store_int(self, "count", min_value=0)

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, count: Any) -> Answer:
        return kv < count

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, count: Any) -> Codes:
        return to_codes(area.kv_first >= count, area.kv_last < count)


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


@dataclasses.dataclass(frozen=True)
class Longformer(AbstractParametric):
    """Sliding window plus global tokens, which attend to all and are attended by all.

    `|q - kv| <= window`, or `kv < global_tokens`, or `q < global_tokens`. Combine with
    `Causal()` for decoders.

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
        store_int(self, "window", "global_tokens", min_value=0)

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


@dataclasses.dataclass(frozen=True)
class Random(AbstractParametric):
    """Random square cells, identical on every machine and backend.

    A cell of `cell` x `cell` positions is allowed if a hash of (seed, q // cell, kv // cell) is
    below `keep`.

    Args:
        keep: expected fraction of allowed cells, 0..1.
        seed: seed of the pattern.
        cell: positions per side of a cell.

    Example:
        >>> print(Random(keep=0.3, seed=2, cell=2).to_ascii(8))
        ####....
        ####....
        ........
        ........
        ##......
        ##......
        ##....##
        ##....##
    """

    keep: float
    seed: int = 0
    cell: int = 128

    def __post_init__(self) -> None:
        store_int(self, "seed", min_value=0)
        store_int(self, "cell", min_value=1)
        _store_keep(self)

    def _params(self) -> tuple[int, ...]:
        return round(self.keep * 2**HASH_BITS), self.seed, self.cell

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, threshold: Any, seed: Any, cell: Any) -> Answer:
        return _is_kept(xp, quotient(xp, q, cell), quotient(xp, kv, cell), threshold, seed)

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, threshold: Any, seed: Any, cell: Any) -> Codes:
        if isinstance(threshold, int) and threshold in (0, 2**HASH_BITS):
            return ALL if threshold else NONE
        cells = Rectangles(*(quotient(xp, end, cell) for end in area))
        return _cover_cells(xp, cells, threshold, seed)


@dataclasses.dataclass(frozen=True)
class BigBird(AbstractParametric):
    """Union of a `Longformer(window, global_tokens)` and a `Random(keep, seed, cell)` mask.

    Example:
        >>> mask = BigBird(window=64, global_tokens=16, keep=0.05)
        >>> bool(mask.allows(5000, 3)), bool(mask.allows(5000, 4990))
        (True, True)
    """

    window: int
    global_tokens: int
    keep: float
    seed: int = 0
    cell: int = 128

    def __post_init__(self) -> None:
        store_int(self, "window", "global_tokens", "seed", min_value=0)
        store_int(self, "cell", min_value=1)
        _store_keep(self)

    def _params(self) -> tuple[int, ...]:
        longformer = Longformer(self.window, self.global_tokens)
        return *longformer._params(), *Random(self.keep, self.seed, self.cell)._params()

    @staticmethod
    def _rule(xp: ModuleType, q: Any, kv: Any, *params: Any) -> Answer:
        return Longformer._rule(xp, q, kv, *params[:2]) | Random._rule(xp, q, kv, *params[2:])

    @staticmethod
    def _cover(xp: ModuleType, area: Rectangles, *params: Any) -> Codes:
        longformer = Longformer._cover(xp, area, *params[:2])
        return unite(xp, longformer, Random._cover(xp, area, *params[2:]))


# Masks that `parse` and `from_dict` build by name.
PARAMETRIC = {
    mask_type.__name__: mask_type
    for mask_type in (
        BigBird, Causal, Chunked, Full, Longformer, Random, Sinks, Strided, Window
    )
}  # fmt: skip


def _store_keep(mask: "Random | BigBird") -> None:
    """Check that `keep` is a fraction and store it as a float."""
    keep = mask.keep
    is_number = isinstance(keep, int | float | np.floating) and not isinstance(keep, bool)
    if not is_number or not 0 <= keep <= 1:
        raise MaskError(
            "keep-fraction",
            f"{type(mask).__name__} needs a fraction for `keep`",
            got=f"{keep=}",
            expected="a number in 0..1",
        )
    object.__setattr__(mask, "keep", float(keep))


def _cover_cells(xp: ModuleType, cells: Rectangles, threshold: Any, seed: Any) -> Codes:
    """Return codes of rectangles of cells; stops when every rectangle is decided."""
    rows = xp.max(cells.q_last - cells.q_first, initial=0) + 1
    columns = xp.max(cells.kv_last - cells.kv_first, initial=0) + 1

    def visit(i, j, empty, full):
        # Smaller rectangles revisit their last cell; this order of terms cannot overflow.
        row = cells.q_first + xp.minimum(i, cells.q_last - cells.q_first)
        column = cells.kv_first + xp.minimum(j, cells.kv_last - cells.kv_first)
        selected = _is_kept(xp, row, column, threshold, seed)
        return empty & ~selected, full & selected

    empty, full = visit(0, 0, np.True_, np.True_)
    if xp is np:
        others = itertools.product(range(int(rows)), range(int(columns)))
        for i, j in itertools.islice(others, 1, None):
            if not (empty | full).any():
                break
            empty, full = visit(i, j, empty, full)
        return to_codes(empty, full)

    def is_undecided(state):
        i, _, empty, full = state
        return (i < rows) & jnp.any(empty | full)

    def advance(state):
        i, j, empty, full = state
        is_row_end = j + 1 == columns
        answers = visit(i, j, empty, full)
        return jnp.where(is_row_end, i + 1, i), jnp.where(is_row_end, 0, j + 1), *answers

    start = (jnp.zeros_like(rows), jnp.zeros_like(columns), empty, full)
    *_, empty, full = jax.lax.while_loop(is_undecided, advance, start)
    return to_codes(empty, full)


def _is_kept(xp: ModuleType, q_cell: Any, kv_cell: Any, threshold: Any, seed: Any) -> Answer:
    """Return whether the hash of (seed, query cell, key cell) is below the threshold."""
    # uint32 arithmetic wraps on purpose; NumPy warns for scalars only.
    with np.errstate(over="ignore"):
        word = _fmix32(xp.asarray(seed).astype(np.uint32) + GOLDEN)
        word = _fmix32(word + q_cell.astype(np.uint32) * GOLDEN)
        word = _fmix32((word ^ GOLDEN) + kv_cell.astype(np.uint32) * GOLDEN)
    return (word >> np.uint32(32 - HASH_BITS)).astype(np.int32) < threshold


def _fmix32(word: Any) -> Any:
    """Apply the 32-bit finalizer of MurmurHash3."""
    word = (word ^ (word >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    word = (word ^ (word >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return word ^ (word >> np.uint32(16))
