"""Base classes of masks: evaluation on pairs and rectangles, operators, drawing, parameters."""

import abc
import dataclasses
import operator
import os
from types import ModuleType
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int8, Integer

from xsake.errors import MaskError, ShapeError
from xsake.masks.coverage import UNBOUNDED, Answer, Codes, Coverage, Rectangles, to_codes

# Positions may be plain ints, NumPy arrays or scalars, or JAX arrays, tracers included.
Positions = Integer[Array | np.ndarray | np.generic, "..."] | int

CHUNK_TOKENS = 2**20  # token pairs evaluated at once, a bound on memory


class AbstractMask(abc.ABC):
    """Predicate on positions: may the query at `q_pos` attend to the key at `kv_pos`?

    Masks are immutable, hashable and comparable, so `jit` takes them as static arguments and
    layouts are cached by them. They combine with `&`, `|` and `~`. A subclass defines `_allows`
    and `_coverage`; masks that depend on the head also define `heads` and `_for_head`.

    Example:
        >>> from xsake.masks import Causal, Sinks, Window
        >>> mask = Causal() & (Window(left=2, right=0) | Sinks(1))
        >>> mask
        Causal() & (Window(left=2, right=0) | Sinks(count=1))
        >>> print(mask.to_ascii(5))
        #....
        ##...
        ###..
        ####.
        #.###
    """

    @property
    def heads(self) -> int | None:
        """Number of heads with separate rules; None if all heads share one rule."""
        return None

    @abc.abstractmethod
    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        """Evaluate the mask on validated arrays of `xp`; any broadcastable result shape."""

    @abc.abstractmethod
    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        """Return `Coverage` codes for validated arrays of `xp`, in any broadcastable shape."""

    def allows(
        self, q_pos: Positions, kv_pos: Positions, head: Positions | None = None
    ) -> Bool[Array | np.ndarray, "..."]:
        """Return whether each query position may attend to each key position.

        Args:
            q_pos, kv_pos: integers >= 0 that broadcast; NumPy, or JAX under any transformation.
            head: head indices, broadcast likewise; needed when `heads` is not None.

        Returns:
            Read-only booleans of the broadcast shape.

        Example:
            >>> import numpy as np
            >>> from xsake.masks import Causal
            >>> Causal().allows(np.array([[0], [1]]), np.array([0, 1])).tolist()
            [[True, False], [True, True]]
        """
        xp, (q, kv), head, shape = self._canonicalize_args({"q_pos": q_pos, "kv_pos": kv_pos}, head)
        return xp.broadcast_to(self._allows(xp, q, kv, head), shape)

    def coverage(
        self,
        q_first: Positions,
        q_last: Positions,
        kv_first: Positions,
        kv_last: Positions,
        head: Positions | None = None,
    ) -> Int8[Array | np.ndarray, "..."]:
        """Return how much of each rectangle is allowed, without evaluating its tokens.

        Args:
            q_first, q_last: query positions of each rectangle, inclusive.
            kv_first, kv_last: key positions, inclusive.
            head: head indices; needed when `heads` is not None.

        Returns:
            `Coverage` codes. NONE, SOME and ALL are exact; UNKNOWN requires token evaluation.

        Example:
            >>> import numpy as np
            >>> from xsake.masks import Causal, Coverage
            >>> first = np.array([0, 4, 8])
            >>> [Coverage(c).name for c in Causal().coverage(4, 7, first, first + 3)]
            ['ALL', 'SOME', 'NONE']
        """
        ends = {"q_first": q_first, "q_last": q_last, "kv_first": kv_first, "kv_last": kv_last}
        xp, area, head, shape = self._canonicalize_args(ends, head)
        return xp.broadcast_to(self._coverage(xp, Rectangles(*area), head), shape)

    def _canonicalize_args(self, named: dict[str, Positions], head: Positions | None):
        """Return array namespace, validated positions, validated head and the broadcast shape."""
        if head is not None:
            named = named | {"head": head}
        elif self.heads is not None:
            raise MaskError(
                "head-missing",
                "a mask with per-head rules needs `head`",
                got=repr(self),
                expected=f"head indices in 0..{self.heads - 1}",
                fix="pass head=..., or select one head with mask.for_head(h)",
            )
        xp = jnp if any(isinstance(values, jax.Array) for values in named.values()) else np
        arrays = [_as_positions(xp, values, name) for name, values in named.items()]
        if head is not None and xp is np and arrays[-1].size:
            self._check_head(int(arrays[-1].min()))
            self._check_head(int(arrays[-1].max()))
        shape = np.broadcast_shapes(*(array.shape for array in arrays))
        # Equal ranks, because JAX may forbid implicit rank promotion.
        rank = len(shape)
        arrays = [
            array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)
            for array in arrays
        ]
        return xp, arrays, None if head is None else arrays.pop(), shape

    def _check_head(self, head: int) -> None:
        if self.heads is not None and not 0 <= head < self.heads:
            raise MaskError(
                "head-range", "head index out of range", got=head, expected=f"0..{self.heads - 1}"
            )

    def for_head(self, head: int) -> "AbstractMask":
        """Return the mask of one head, without a head axis; a mask without heads returns itself.

        Example:
            >>> from xsake.masks import Causal, Full, PerHead
            >>> PerHead([Causal(), Full()]).for_head(1)
            Full()
        """
        if self.heads is None:
            return self
        self._check_head(head)
        return self._for_head(head)

    def _for_head(self, head: int) -> "AbstractMask":
        """Return the mask of one head, in range, of a mask with heads."""
        raise NotImplementedError

    def __and__(self, other: "AbstractMask") -> "AbstractMask":
        from xsake.masks.algebra import And, join  # circular import

        return join(And, self, other) if isinstance(other, AbstractMask) else NotImplemented

    def __or__(self, other: "AbstractMask") -> "AbstractMask":
        from xsake.masks.algebra import Or, join

        return join(Or, self, other) if isinstance(other, AbstractMask) else NotImplemented

    def __invert__(self) -> "AbstractMask":
        from xsake.masks.algebra import negate

        return negate(self)

    def __bool__(self) -> NoReturn:
        raise MaskError(
            "truth-value",
            "a mask has no truth value",
            got=f"bool({self!r})",
            fix="combine masks with & | ~ instead of `and`, `or`, `not`",
        )

    def __str__(self) -> str:
        from xsake.masks.draw import summary  # circular import

        return summary(self)

    def to_ascii(
        self,
        q_tokens: int,
        kv_tokens: int | None = None,
        *,
        width: int = 64,
        head: int | None = None,
    ) -> str:
        """Draw the mask in characters: `#` all, `+` some, `.` none of a cell is allowed.

        Rows are queries, columns are keys. Tokens are merged into cells to fit `width` characters
        per line and `width // 2` lines. `kv_tokens` defaults to `q_tokens`, `head` to all heads.

        Example:
            >>> from xsake.masks import Causal
            >>> print(Causal().to_ascii(3))
            #..
            ##.
            ###
        """
        from xsake.masks.draw import ascii_picture

        return ascii_picture(self, q_tokens, kv_tokens, width, head)

    def draw(
        self,
        path: str | os.PathLike[str],
        q_tokens: int,
        kv_tokens: int | None = None,
        *,
        head: int | None = None,
    ) -> None:
        """Write a PNG picture of the mask; needs matplotlib (`pip install xsake[viz]`).

        `kv_tokens` defaults to `q_tokens`, `head` to all heads in a grid.

        Example:
            >>> from xsake.masks import Causal
            >>> Causal().draw("causal.png", 64)  # doctest: +SKIP
        """
        from xsake.masks.draw import draw_png

        draw_png(self, path, q_tokens, kv_tokens, head)


class AbstractParametric(AbstractMask):
    """Mask whose rule is a function of positions and `_params()`.

    The rules take the parameters as arguments, so masks of several heads that differ only in
    parameters are evaluated at once, with arrays of parameters.
    """

    def _params(self) -> tuple[int, ...]:
        """Return the int32 parameters: the fields, unless a mask derives them."""
        fields = dataclasses.fields(cast(Any, self))
        return tuple(getattr(self, field.name) for field in fields)

    @staticmethod
    @abc.abstractmethod
    def _rule(*arguments: Any, **kwargs: Any) -> Answer:
        """Evaluate `allows`: `_rule(xp, q, kv, *params)`."""

    @staticmethod
    @abc.abstractmethod
    def _cover(*arguments: Any, **kwargs: Any) -> Codes:
        """Evaluate `coverage`: `_cover(xp, area, *params)`."""

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self._rule(xp, q, kv, *self._params())

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return self._cover(xp, area, *self._params())


def store_int(mask: AbstractMask, *names: str, min_value: int, max_value: int = UNBOUNDED) -> None:
    """Check the range of fields of a frozen mask and store them as ints."""
    for name in names:
        value = getattr(mask, name)
        try:
            number = None if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = None
        if number is None or not min_value <= number <= max_value:
            raise MaskError(
                "parameter",
                f"{type(mask).__name__} needs an integer `{name}` in its range",
                got=f"{name}={value!r}",
                expected=f"an integer in {min_value}..{max_value}",
            )
        object.__setattr__(mask, name, number)


def resolve_coverage(mask: AbstractMask, area: Rectangles, head=None) -> np.ndarray:
    """Return coverage codes of NumPy rectangles, with UNKNOWN resolved by token evaluation."""
    shape = np.broadcast_shapes(*(edge.shape for edge in area))
    codes = np.broadcast_to(np.asarray(mask.coverage(*area, head)), shape)
    unknown = np.nonzero(codes == Coverage.UNKNOWN)
    if unknown[0].size == 0:
        return codes
    codes = codes.copy()
    edges = Rectangles(*(np.broadcast_to(edge, shape)[unknown] for edge in area))
    heads = None if head is None else np.broadcast_to(head, shape)[unknown]
    codes[unknown] = _evaluate_tokens(mask, edges, heads)
    return codes


def _evaluate_tokens(mask: AbstractMask, area: Rectangles, head=None) -> np.ndarray:
    """Return coverage codes [n] by evaluating token pairs, `CHUNK_TOKENS` at a time."""
    heights = area.q_last - area.q_first + 1
    widths = area.kv_last - area.kv_first + 1
    tall, wide = int(heights.max()), int(widths.max())
    strip = max(1, min(tall, CHUNK_TOKENS // wide))
    group = max(1, CHUNK_TOKENS // (strip * wide))
    allowed = np.zeros(heights.size, np.int64)
    for first in range(0, heights.size, group):
        part = slice(first, first + group)
        chunk = Rectangles(*(edge[part, None, None] for edge in area))
        kv = chunk.kv_first + np.arange(wide, dtype=np.int32)
        heads = None if head is None else head[part, None, None]
        for top in range(0, tall, strip):
            q = chunk.q_first + np.arange(top, min(top + strip, tall), dtype=np.int32)[:, None]
            inside = (q <= chunk.q_last) & (kv <= chunk.kv_last)
            # A mask may use jax.numpy; evaluate it eagerly even inside jit.
            with jax.ensure_compile_time_eval():
                pairs = np.asarray(mask.allows(q, kv, heads))
            allowed[part] += np.count_nonzero(inside & pairs, axis=(1, 2))
    return to_codes(allowed == 0, allowed == heights.astype(np.int64) * widths)


def require_mask(mask: Any) -> None:
    """Raise MaskError unless `mask` is None or a mask of `xsake.masks`."""
    if mask is None or isinstance(mask, AbstractMask):
        return
    shape = getattr(mask, "shape", None)
    received = type(mask).__name__ if shape is None else f"{mask.dtype} array {tuple(shape)}"
    raise MaskError(
        "type",
        "`mask` has an unsupported type",
        got=received if shape is not None else f"{received} {mask!r}"[:80],
        expected="a mask of xsake.masks, such as Causal(), an array of booleans, or None",
        fix="pass numbers to add as `bias`, and padding as `q_segment_ids`",
    )


def _as_positions(xp: ModuleType, values: Positions, name: str):
    """Convert `values` to a signed integer array of `xp`, at least 32 bits wide."""
    array = xp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ShapeError(
            "index-dtype",
            f"`{name}` must hold integers",
            got=f"dtype {array.dtype}",
            expected="an integer dtype",
        )
    if jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        # JAX without x64 cannot widen; positions fit int32 by contract.
        return array.astype(np.int64 if xp is np else np.int32)
    return array if array.dtype.itemsize >= 4 else array.astype(np.int32)
