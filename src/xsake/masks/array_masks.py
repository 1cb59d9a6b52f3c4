"""Masks backed by arrays: Segments, Explicit and ListedBlocks."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Integer

from xsake.errors import LayoutError, MaskError
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import (
    ALL,
    NONE,
    SOME,
    UNBOUNDED,
    UNKNOWN,
    Answer,
    Codes,
    Rectangles,
    look_up,
    quotient,
)


class AbstractArrayMask(AbstractMask):
    """Mask with arrays, compared and hashed by a digest of their content."""

    def _arrays(self) -> tuple[np.ndarray, ...]:
        """Return the arrays of the digest."""
        raise NotImplementedError

    @functools.cached_property
    def digest(self) -> str:
        """Hexadecimal digest of the arrays' shapes and values."""
        state = hashlib.blake2b(digest_size=16)
        for array in self._arrays():
            state.update(repr((array.shape, array.dtype.str)).encode())
            state.update(np.packbits(array) if array.dtype == bool else array)
        return state.hexdigest()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.digest == other.digest

    def __hash__(self) -> int:
        return hash((type(self).__name__, self.digest))


def _copy_array(values: Any, name: str, dtype: type) -> np.ndarray:
    """Return a read-only NumPy copy of `values`, which are hashed by content."""
    if isinstance(values, jax.core.Tracer):
        raise MaskError(
            "concrete",
            f"`{name}` must be concrete",
            got="a tracer",
            expected="a NumPy array or a concrete JAX array",
            fix="build the mask outside jit; for data that changes per call use segment ids "
            "or a traced layout",
        )
    array = np.asarray(values)
    dtype_kinds = "b" if dtype is bool else "iu"
    if array.size and array.dtype.kind not in dtype_kinds:
        raise MaskError(
            "array-dtype",
            f"`{name}` has the wrong dtype",
            got=array.dtype,
            expected="bool" if dtype is bool else "integers",
        )
    limits = None if dtype is bool else np.iinfo(dtype)
    if limits and array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise MaskError(
            "array-int32", f"`{name}` does not fit int32", got=f"{array.min()}..{array.max()}"
        )
    array = np.array(array, dtype=dtype, order="C")
    array.flags.writeable = False
    return array


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Segments(AbstractArrayMask):
    """Packed sequences: a query attends to the keys of its segment.

    Allows `q_ids[q] == kv_ids[kv] >= 0`. Negative ids and positions past the arrays are padding,
    which is masked as query and as key. Coverage is exact if segments have the same order in both
    arrays, as packed documents have; where ids interleave it may be UNKNOWN.

    Args:
        q_ids: [Tq] segment id of each query position.
        kv_ids: [Tk] segment id of each key position; `q_ids` if None.

    Example:
        >>> print(Segments([0, 0, 1, -1]).to_ascii(4))
        ##..
        ##..
        ..#.
        ....
    """

    q_ids: Integer[np.ndarray | Array, " Tq"] | Sequence[int]
    kv_ids: Integer[np.ndarray | Array, " Tk"] | Sequence[int] | None = None

    def __post_init__(self) -> None:
        for name in ("q_ids", "kv_ids"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, self.q_ids)
                continue
            ids = _copy_array(getattr(self, name), name, np.int32)
            if ids.ndim != 1:
                raise MaskError("array-axes", f"`{name}` must be 1-D", got=f"shape {ids.shape}")
            object.__setattr__(self, name, ids)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return np.asarray(self.q_ids), np.asarray(self.kv_ids)

    @functools.cached_property
    def _tables(self) -> "tuple[SegmentTable, SegmentTable]":
        """Tables of queries and keys, which give coverage in constant time."""
        q_ids, kv_ids = self._arrays()
        unique_ids, index = np.unique(np.concatenate([q_ids, kv_ids]), return_inverse=True)
        q_index, kv_index = index[: q_ids.size], index[q_ids.size :]
        shared = np.intersect1d(q_index[q_ids >= 0], kv_index)
        # Ranks follow the order of appearance; ids need not be ascending.
        first_seen = np.zeros(unique_ids.size, np.int64)
        first_seen[q_index[::-1]] = np.arange(q_ids.size)[::-1]
        ranks = np.full(unique_ids.size, -1)
        ranks[shared[np.argsort(first_seen[shared])]] = np.arange(shared.size)
        q_table = SegmentTable.from_ids(q_ids, ranks[q_index], -1)
        return q_table, SegmentTable.from_ids(kv_ids, ranks[kv_index], -2)

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        q_table, kv_table = self._tables
        q_ids = look_up(xp, q_table.ids, q_table.index(xp, q))
        return q_ids == look_up(xp, kv_table.ids, kv_table.index(xp, kv))

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        q, kv = self._tables
        q_start, q_stop = q.index(xp, area.q_first), q.index(xp, area.q_last)
        kv_start, kv_stop = kv.index(xp, area.kv_first), kv.index(xp, area.kv_last)
        full = (
            (look_up(xp, q.ids, q_start) == look_up(xp, kv.ids, kv_start))
            & (look_up(xp, q.run_last, q_start) >= area.q_last)
            & (look_up(xp, kv.run_last, kv_start) >= area.kv_last)
        )
        empty = (look_up(xp, q.next_shared, q_start) > area.q_last) | (
            look_up(xp, kv.next_shared, kv_start) > area.kv_last
        )
        if not (q.is_ordered and kv.is_ordered):
            return xp.where(full, ALL, xp.where(empty, NONE, UNKNOWN))
        # A range then contains every rank between its first and last.
        q_from, q_until = look_up(xp, q.rank_from, q_start), look_up(xp, q.rank_until, q_stop)
        kv_from, kv_until = look_up(xp, kv.rank_from, kv_start), look_up(xp, kv.rank_until, kv_stop)
        empty = empty | (q_from > kv_until) | (kv_from > q_until)
        return xp.where(full, ALL, xp.where(empty, NONE, SOME))

    def __repr__(self) -> str:
        q_ids, kv_ids = self._arrays()
        arrays = [q_ids] if np.array_equal(q_ids, kv_ids) else [q_ids, kv_ids]
        if max(array.size for array in arrays) <= 16:
            return f"Segments({', '.join(str(array.tolist()) for array in arrays)})"
        tokens = " x ".join(str(array.size) for array in arrays)
        count = np.unique(kv_ids[kv_ids >= 0]).size
        return f"Segments(<{tokens} tokens, {count} segments, {self.digest[:8]}>)"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Explicit(AbstractArrayMask):
    """Pairs that are True in an array; pairs outside of it are masked.

    Args:
        array: [Tq, Tk] booleans, or [H, Tq, Tk] for per-head masks.

    Example:
        >>> import numpy as np
        >>> print(Explicit(np.eye(3, dtype=bool)).to_ascii(3, 4))
        #...
        .#..
        ..#.
    """

    array: Bool[np.ndarray | Array, "Tq Tk"] | Bool[np.ndarray | Array, "H Tq Tk"]

    def __post_init__(self) -> None:
        array = _copy_array(self.array, "array", bool)
        if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[0] == 0):
            raise MaskError(
                "explicit-shape",
                "an explicit mask must be 2-D or 3-D",
                got=f"shape {array.shape}",
                expected="[Tq, Tk] or [H, Tq, Tk] with H >= 1",
            )
        object.__setattr__(self, "array", array)

    @property
    def heads(self) -> int | None:
        return self.array.shape[0] if self.array.ndim == 3 else None

    def _for_head(self, head: int) -> AbstractMask:
        return Explicit(self.array[head])

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return (np.asarray(self.array),)

    @functools.cached_property
    def _padded(self) -> np.ndarray:
        """The array padded by a False row and column for positions outside of it."""
        border = [(0, 0)] * (self.array.ndim - 2) + [(0, 1), (0, 1)]
        return np.pad(np.asarray(self.array), border)

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        rows, columns = self.array.shape[-2:]
        index = (xp.minimum(q, rows), xp.minimum(kv, columns))
        return look_up(xp, self._padded, *(index if self.heads is None else (head, *index)))

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return UNKNOWN

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.array.shape))
        share = float(np.mean(self.array)) if self.array.size else 0.0
        return f"Explicit(<{shape}, {share:.1%} allowed, {self.digest[:8]}>)"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ListedBlocks(AbstractArrayMask):
    """Pairs of selected blocks; the mask of layouts that were merged into larger blocks.

    Args:
        chosen: bool [heads, Nq, Nk]; one head is shared by all heads.
        block_q, block_kv: block sizes in tokens.

    Example:
        >>> mask = ListedBlocks(np.array([[[True, False], [True, True]]]), block_q=4, block_kv=4)
        >>> mask.allows(np.array([3, 3, 4]), np.array([3, 4, 4])).tolist()
        [True, False, True]
    """

    chosen: Bool[np.ndarray, "H Nq Nk"]
    block_q: int
    block_kv: int

    def __post_init__(self):
        if self.chosen.ndim != 3 or self.chosen.dtype != bool or 0 in self.chosen.shape:
            raise LayoutError(
                "chosen-type",
                "`chosen` must be a boolean grid",
                got=f"shape {self.chosen.shape}, dtype {self.chosen.dtype}",
                expected="bool [heads, Nq, Nk], no axis empty",
            )
        object.__setattr__(self, "chosen", _copy_array(self.chosen, "chosen", bool))

    @functools.cached_property
    def _blocks(self) -> Explicit:
        """Mask of block indices."""
        return Explicit(self.chosen if self.heads else self.chosen[0])

    @property
    def heads(self) -> int | None:
        return None if self.chosen.shape[0] == 1 else self.chosen.shape[0]

    def _for_head(self, head: int) -> AbstractMask:
        return ListedBlocks(self.chosen[head : head + 1], self.block_q, self.block_kv)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.chosen, np.array([self.block_q, self.block_kv])

    def __repr__(self) -> str:
        listed = int(np.count_nonzero(self.chosen))
        sizes = f"block_q={self.block_q}, block_kv={self.block_kv}"
        return f"ListedBlocks({listed} of {self.chosen.size}, {sizes})"

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        blocks = quotient(xp, q, self.block_q), quotient(xp, kv, self.block_kv)
        return self._blocks._allows(xp, *blocks, head)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        """Return exact codes inside one block; UNKNOWN for rectangles over several blocks."""
        q_block = quotient(xp, area.q_first, self.block_q)
        kv_block = quotient(xp, area.kv_first, self.block_kv)
        one_block = (q_block == quotient(xp, area.q_last, self.block_q)) & (
            kv_block == quotient(xp, area.kv_last, self.block_kv)
        )
        chosen = self._blocks._allows(xp, q_block, kv_block, head)
        code = xp.where(chosen, ALL, NONE)
        return xp.where(one_block, code, UNKNOWN)


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentTable:
    """Tables of one array of ids, with an extra entry for positions past its end.

    A segment is *shared* if its id occurs on both sides; ranks number the shared segments in
    order of appearance.
    """

    ids: Int[np.ndarray, " n"]  # padding replaced by an id absent from the other side
    run_last: Int[np.ndarray, " n"]  # last position of the run of equal ids around a position
    next_shared: Int[np.ndarray, " n"]  # nearest position of a shared segment, at or after
    rank_from: Int[np.ndarray, " n"]  # rank at that position
    rank_until: Int[np.ndarray, " n"]  # rank at the nearest such position, at or before
    is_ordered: bool  # ranks are non-decreasing

    @classmethod
    def from_ids(cls, ids: np.ndarray, ranks: np.ndarray, padding: int) -> "SegmentTable":
        """Build tables from ids and ranks, -1 where a position has no shared segment."""
        ids = np.append(np.where(ids < 0, padding, ids), padding).astype(np.int32)
        ranks = np.append(ranks, -1)
        positions = np.arange(ids.size)
        ends = np.append(np.flatnonzero(np.diff(ids)), UNBOUNDED)
        is_shared = ranks >= 0
        shared_at = np.where(is_shared, positions, UNBOUNDED)
        next_shared = np.minimum.accumulate(shared_at[::-1])[::-1]
        previous = np.maximum.accumulate(np.where(is_shared, positions, -1))
        return cls(
            ids=ids,
            run_last=ends[np.searchsorted(ends, positions)].astype(np.int32),
            next_shared=next_shared.astype(np.int32),
            rank_from=ranks[np.minimum(next_shared, ids.size - 1)].astype(np.int32),
            rank_until=np.where(previous < 0, -1, ranks[previous]).astype(np.int32),
            is_ordered=bool(np.all(np.diff(ranks[is_shared]) >= 0)),
        )

    def index(self, xp: ModuleType, positions: Any) -> Any:
        """Return table indices of positions; positions past the end are padding."""
        return xp.minimum(positions, self.ids.size - 1)
