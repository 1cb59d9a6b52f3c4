"""Owns what every mask can do: answer for pairs, answer for rectangles, combine, show itself."""

import abc
import os
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
from jaxtyping import Array, Bool, Int8

from xsake.errors import MaskError
from xsake.masks.arrays import Answer, Codes, Positions, as_positions, namespace, with_rank
from xsake.masks.coverage import Rectangles


class AbstractMask(abc.ABC):
    """A rule on positions: may the query at `q_pos` see the key at `kv_pos`?

    Masks are immutable, hashable and comparable, so `jit` takes them as static arguments and
    layouts are cached by them. They combine with `&`, `|` and `~`. A new kind of mask defines
    `_allows` and, if it can answer for rectangles, `_coverage`; masks whose rule depends on the
    head also define `heads` and `for_head`.

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
        """Number of heads the rule tells apart; None if it is the same for every head."""
        return None

    @abc.abstractmethod
    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        """The rule, on checked arrays of `xp`; the answer may be any shape that broadcasts."""

    @abc.abstractmethod
    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        """`Coverage` codes on checked arrays of `xp`, any shape that broadcasts."""

    def allows(
        self, q_pos: Positions, kv_pos: Positions, head: Positions | None = None
    ) -> Bool[Array | np.ndarray, "..."]:
        """Whether each query position may see each key position.

        Args:
            q_pos: query positions, integers >= 0; NumPy, or JAX under any transformation.
            kv_pos: key positions, broadcast against `q_pos`.
            head: head indices, broadcast likewise; needed when `heads` is not None.

        Returns:
            Booleans of the shape the arguments broadcast to; do not write into them.

        Example:
            >>> import numpy as np
            >>> from xsake.masks import Causal
            >>> Causal().allows(np.array([[0], [1]]), np.array([0, 1])).tolist()
            [[True, False], [True, True]]
        """
        xp, (q, kv), head, shape = self._checked({"q_pos": q_pos, "kv_pos": kv_pos}, head)
        return xp.broadcast_to(self._allows(xp, q, kv, head), shape)

    def coverage(
        self,
        q_first: Positions,
        q_last: Positions,
        kv_first: Positions,
        kv_last: Positions,
        head: Positions | None = None,
    ) -> Int8[Array | np.ndarray, "..."]:
        """How much of each rectangle is allowed, without looking at its tokens.

        Args:
            q_first: first query position of each rectangle.
            q_last: last query position, included; not before `q_first`.
            kv_first: first key position.
            kv_last: last key position, included; not before `kv_first`.
            head: head indices; needed when `heads` is not None.

        Returns:
            `Coverage` codes. NONE, SOME and ALL are exact; UNKNOWN: evaluate the tokens.

        Example:
            >>> import numpy as np
            >>> from xsake.masks import Causal, Coverage
            >>> first = np.array([0, 4, 8])
            >>> [Coverage(c).name for c in Causal().coverage(4, 7, first, first + 3)]
            ['ALL', 'SOME', 'NONE']
        """
        ends = {"q_first": q_first, "q_last": q_last, "kv_first": kv_first, "kv_last": kv_last}
        xp, area, head, shape = self._checked(ends, head)
        return xp.broadcast_to(self._coverage(xp, Rectangles(*area), head), shape)

    def _checked(self, named: dict[str, Positions], head: Positions | None):
        """Array namespace, checked positions, checked head and the common shape."""
        xp = namespace(*named.values(), head)
        arrays = [as_positions(xp, values, name) for name, values in named.items()]
        shapes = [array.shape for array in arrays]
        if head is None:
            if self.heads is not None:
                raise MaskError(
                    "this mask differs between heads, so it needs `head`",
                    got=repr(self),
                    expected=f"head indices in 0..{self.heads - 1}",
                    fix="pass head=..., or take the mask of one head with mask.for_head(h)",
                )
        else:
            head = as_positions(xp, head, "head")
            shapes.append(head.shape)
            if xp is np and self.heads is not None and head.size:
                self._check_head(int(head.min()))
                self._check_head(int(head.max()))
        shape = np.broadcast_shapes(*shapes)
        # Equal ranks, so that formulas also work where JAX forbids implicit rank promotion.
        arrays = [with_rank(array, len(shape)) for array in arrays]
        return xp, arrays, None if head is None else with_rank(head, len(shape)), shape

    def _check_head(self, head: int) -> None:
        if self.heads is not None and not 0 <= head < self.heads:
            raise MaskError("no such head in this mask", got=head, expected=f"0..{self.heads - 1}")

    def for_head(self, head: int) -> "AbstractMask":
        """The mask of one head, itself without heads.

        Args:
            head: head index in 0..heads-1; a mask without heads returns itself for any head.

        Example:
            >>> from xsake.masks import Causal, Full, PerHead
            >>> PerHead([Causal(), Full()]).for_head(1)
            Full()
        """
        return self

    def __and__(self, other: "AbstractMask") -> "AbstractMask":
        from xsake.masks.algebra import And, join  # the algebra is made of masks

        return join(And, self, other) if isinstance(other, AbstractMask) else NotImplemented

    def __or__(self, other: "AbstractMask") -> "AbstractMask":
        from xsake.masks.algebra import Or, join

        return join(Or, self, other) if isinstance(other, AbstractMask) else NotImplemented

    def __invert__(self) -> "AbstractMask":
        from xsake.masks.algebra import negate

        return negate(self)

    def __bool__(self) -> NoReturn:
        raise MaskError(
            "a mask has no truth value",
            got=f"bool({self!r})",
            fix="combine masks with & | ~ instead of `and`, `or`, `not`",
        )

    def _extent(self) -> int:
        """How many tokens a picture needs to show what is typical of this mask."""
        return 16

    def __str__(self) -> str:
        from xsake.masks.draw import summary  # drawing looks at masks, not the other way round

        return summary(self)

    def to_ascii(
        self,
        q_tokens: int,
        kv_tokens: int | None = None,
        *,
        width: int = 64,
        head: int | None = None,
    ) -> str:
        """A picture of the mask in characters: `#` all, `+` some, `.` none of a cell is allowed.

        Queries run down, keys run across. A picture wider than `width` merges tokens into cells.

        Args:
            q_tokens: number of queries shown.
            kv_tokens: number of keys shown; `q_tokens` if None.
            width: most characters per line; lines are at most half as many, so squares look square.
            head: which head to show; None shows all of them, one after the other.

        Returns:
            The lines, joined by newlines.

        Example:
            >>> from xsake.masks import Causal
            >>> print(Causal().to_ascii(3))
            #..
            ##.
            ###
        """
        from xsake.masks.draw import ascii_picture

        return ascii_picture(self, q_tokens, kv_tokens, width=width, head=head)

    def draw(
        self,
        path: str | os.PathLike[str],
        q_tokens: int,
        kv_tokens: int | None = None,
        *,
        head: int | None = None,
    ) -> None:
        """Write a PNG picture of the mask; needs matplotlib (`pip install xsake[viz]`).

        Args:
            path: file to write.
            q_tokens: number of queries shown.
            kv_tokens: number of keys shown; `q_tokens` if None.
            head: which head to show; None draws all of them in a grid.

        Example:
            >>> from xsake.masks import Causal
            >>> Causal().draw("causal.png", 64)  # doctest: +SKIP
        """
        from xsake.masks.draw import draw_png

        draw_png(self, path, q_tokens, kv_tokens, head=head)


def require_mask(mask: Any) -> None:
    """Refuse masks that are not of `xsake.masks`; None passes."""
    if mask is None or isinstance(mask, AbstractMask):
        return
    shape = getattr(mask, "shape", None)
    kind = type(mask).__name__ if shape is None else f"{mask.dtype} array {tuple(shape)}"
    raise MaskError(
        "`mask` must be a rule on positions",
        got=kind if shape is not None else f"{kind} {mask!r}"[:80],
        expected="a mask of xsake.masks, such as Causal(), or None",
        fix="wrap booleans [Tq, Tk] or [H, Tq, Tk] in xsake.masks.Explicit(numpy_array); "
        "padding belongs in q_segment_ids",
    )
