"""Masks backed by arrays: Segments and Explicit."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Integer

from xsake.errors import MaskError
from xsake.masks.arrays import Answer, Codes, look_up
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import UNKNOWN, Rectangles
from xsake.masks.segment_index import SegmentIndex


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
    """Return a read-only NumPy copy of `values`."""
    if isinstance(values, jax.core.Tracer):
        raise MaskError(
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
            f"`{name}` has the wrong dtype",
            got=array.dtype,
            expected="bool" if dtype is bool else "integers",
        )
    limits = None if dtype is bool else np.iinfo(dtype)
    if limits and array.size and not limits.min <= array.min() <= array.max() <= limits.max:
        raise MaskError(f"`{name}` does not fit int32", got=f"{array.min()}..{array.max()}")
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
                raise MaskError(f"`{name}` must be 1-D", got=f"shape {ids.shape}")
            object.__setattr__(self, name, ids)

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return np.asarray(self.q_ids), np.asarray(self.kv_ids)

    @functools.cached_property
    def _index(self) -> SegmentIndex:
        return SegmentIndex.from_ids(*self._arrays())

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self._index.q.id_at(xp, q) == self._index.kv.id_at(xp, kv)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return self._index.coverage(xp, area)

    def _extent(self) -> int:
        return max(1, *(array.size for array in self._arrays()))

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
                "an explicit mask must be 2-D or 3-D",
                got=f"shape {array.shape}",
                expected="[Tq, Tk] or [H, Tq, Tk] with H >= 1",
            )
        object.__setattr__(self, "array", array)

    @property
    def heads(self) -> int | None:
        return self.array.shape[0] if self.array.ndim == 3 else None

    def for_head(self, head: int) -> AbstractMask:
        if self.heads is None:
            return self
        self._check_head(head)
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

    def _extent(self) -> int:
        return max(1, *self.array.shape[-2:])

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.array.shape))
        share = float(np.mean(self.array)) if self.array.size else 0.0
        return f"Explicit(<{shape}, {share:.1%} allowed, {self.digest[:8]}>)"
