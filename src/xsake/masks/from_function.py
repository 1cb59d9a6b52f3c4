"""Mask defined by a function of positions."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

from xsake.errors import MaskError
from xsake.masks.base import AbstractMask, store_int
from xsake.masks.coverage import UNKNOWN, Answer, Codes, Rectangles


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FromFunction(AbstractMask):
    """Mask defined by a user function. Layouts evaluate every pair, so prefer other masks.

    Equality is identity of the function object. Build the mask once and reuse it: a new lambda
    per call causes a new layout and a new compilation per call.

    Args:
        function: `f(q_pos, kv_pos) -> bool array`, or `f(q_pos, kv_pos, head)` if `heads` is
            given. It receives broadcastable NumPy or JAX arrays, must be elementwise on both,
            and must be pure.
        heads: number of heads with separate rules; None if all heads share one rule.
        only_head: head passed to the function; set by `for_head`.

    Example:
        >>> print(FromFunction(lambda q, kv: (q + kv) % 2 == 0).to_ascii(3))
        #.#
        .#.
        #.#
    """

    function: Callable[..., Any]
    heads: int | None = None  # pyrefly: ignore[bad-override]
    only_head: int | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise MaskError(
                "function",
                "FromFunction needs a function",
                got=repr(self.function),
                expected="a callable",
            )
        if self.heads is not None:
            store_int(self, "heads", min_value=1)
        if self.only_head is not None:
            store_int(self, "only_head", min_value=0)

    def _for_head(self, head: int) -> AbstractMask:
        return FromFunction(self.function, only_head=head)

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        if self.only_head is not None:
            head = xp.asarray(self.only_head)
        is_headless = self.heads is None and self.only_head is None
        allowed = self.function(q, kv) if is_headless else self.function(q, kv, head)
        allowed = xp.asarray(allowed)
        if allowed.dtype != bool:
            raise MaskError(
                "function-dtype",
                "the function of a FromFunction mask must return booleans",
                got=f"dtype {allowed.dtype} from {self!r}",
                expected="dtype bool",
            )
        return allowed

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return UNKNOWN

    def _identity(self) -> tuple[int, int | None, int | None]:
        # The mask holds a reference to its function, so the id stays unique.
        return id(self.function), self.heads, self.only_head

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FromFunction):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        fields = [getattr(self.function, "__qualname__", repr(self.function))]
        fields += [
            f"{name}={getattr(self, name)}"
            for name in ("heads", "only_head")
            if getattr(self, name) is not None
        ]
        return f"FromFunction({', '.join(fields)})"
