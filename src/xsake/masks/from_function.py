"""Owns the mask that is any function of positions."""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

from xsake.errors import MaskError
from xsake.masks.arrays import Answer, Codes
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import UNKNOWN, Rectangles
from xsake.masks.structured import store_int


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class FromFunction(AbstractMask):
    """Whatever a function says; layouts must then evaluate every pair, so prefer other masks.

    Two of these are equal if they hold the very same function object, so build the mask once
    and keep it: a new lambda per call means a new layout and a new compilation per call.

    Args:
        function: `f(q_pos, kv_pos) -> bool array`, or `f(q_pos, kv_pos, head)` if `heads` is
            given. It gets NumPy or JAX arrays that broadcast together, must work elementwise
            on both, and must depend on nothing else that changes.
        heads: number of heads the function tells apart; None if there is no difference.
        only_head: call the function with this head; what `for_head` gives.

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
                "FromFunction needs a function", got=repr(self.function), expected="a callable"
            )
        if self.heads is not None:
            store_int(self, "heads", least=1)
        if self.only_head is not None:
            store_int(self, "only_head", least=0)

    def for_head(self, head: int) -> AbstractMask:
        if self.heads is None:
            return self
        self._check_head(head)
        return FromFunction(self.function, only_head=head)

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        if self.only_head is not None:
            head = xp.asarray(self.only_head)
        is_headless = self.heads is None and self.only_head is None
        allowed = self.function(q, kv) if is_headless else self.function(q, kv, head)
        allowed = xp.asarray(allowed)
        if allowed.dtype != bool:
            raise MaskError(
                "the function of a FromFunction mask must answer with booleans",
                got=f"dtype {allowed.dtype} from {self!r}",
                expected="dtype bool",
            )
        return allowed

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return UNKNOWN

    def _identity(self) -> tuple[int, int | None, int | None]:
        # The mask keeps its function alive, so no other object can take over the id.
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
