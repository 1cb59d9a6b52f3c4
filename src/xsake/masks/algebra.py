"""Mask algebra: And, Or, Not, and their simplification."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar

from xsake.errors import MaskError
from xsake.masks.arrays import UNBOUNDED, Answer, Codes
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import Rectangles, complement, intersect, unite
from xsake.masks.local import AbstractBand, Window


def common_heads(masks: tuple[AbstractMask, ...]) -> int | None:
    """Return the head count of all per-head masks; None if there are none."""
    counts = {mask.heads for mask in masks} - {None}
    if len(counts) > 1:
        raise MaskError(
            "cannot combine masks with different numbers of heads",
            got=" and ".join(f"{mask.heads} heads" for mask in masks if mask.heads is not None),
            expected="equal head counts, or masks without heads",
        )
    return counts.pop() if counts else None


@dataclasses.dataclass(frozen=True, repr=False)
class AbstractHeadList(AbstractMask):
    """List of one mask per head; operators apply to each member."""

    members: Sequence[AbstractMask]

    @abc.abstractmethod
    def _with_members(self, members: Sequence[AbstractMask]) -> "AbstractHeadList":
        """Return a list of the same type with other members."""


@dataclasses.dataclass(frozen=True, repr=False)
class AbstractCombination(AbstractMask):
    """Two or more masks under one associative operator; `join` flattens nested ones."""

    parts: tuple[AbstractMask, ...]

    symbol: ClassVar[str]

    def __post_init__(self) -> None:
        common_heads(self.parts)

    @property
    def heads(self) -> int | None:
        return common_heads(self.parts)

    def for_head(self, head: int) -> AbstractMask:
        if self.heads is None:
            return self
        self._check_head(head)
        return functools.reduce(
            functools.partial(join, type(self)), (part.for_head(head) for part in self.parts)
        )

    @functools.cached_property
    def _fused(self) -> tuple[AbstractMask, ...]:
        """Parts with all bands fused into one: fewer operations and exact coverage."""
        bands = [part for part in self.parts if isinstance(part, AbstractBand)]
        if len(bands) < 2:
            return self.parts
        # Every band contains the diagonal, so unions and intersections of bands are bands.
        tightest = min if isinstance(self, And) else max
        left, right = map(tightest, *(band._params() for band in bands))
        band = Window(*(None if limit == UNBOUNDED else limit for limit in (left, right)))
        return (band, *(part for part in self.parts if not isinstance(part, AbstractBand)))

    def _extent(self) -> int:
        return max(part._extent() for part in self.parts)

    def __repr__(self) -> str:
        return f" {self.symbol} ".join(_parenthesize(part) for part in self.parts)


class And(AbstractCombination):
    """Intersection: pairs allowed by every part; written `a & b`.

    Example:
        >>> from xsake.masks import Causal, Window
        >>> Causal() & Window(left=255, right=0)
        Causal() & Window(left=255, right=0)
    """

    symbol = "&"

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        first, *others = self._fused
        allowed = first._allows(xp, q, kv, head)
        for part in others:
            allowed = allowed & part._allows(xp, q, kv, head)
        return allowed

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        first, *others = self._fused
        code = first._coverage(xp, area, head)
        for part in others:
            code = intersect(xp, code, part._coverage(xp, area, head))
        return code


class Or(AbstractCombination):
    """Union: pairs allowed by at least one part; written `a | b`.

    Example:
        >>> from xsake.masks import Sinks, Window
        >>> Sinks(4) | Window(left=255, right=0)
        Sinks(count=4) | Window(left=255, right=0)
    """

    symbol = "|"

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        first, *others = self._fused
        allowed = first._allows(xp, q, kv, head)
        for part in others:
            allowed = allowed | part._allows(xp, q, kv, head)
        return allowed

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        first, *others = self._fused
        code = first._coverage(xp, area, head)
        for part in others:
            code = unite(xp, code, part._coverage(xp, area, head))
        return code


@dataclasses.dataclass(frozen=True, repr=False)
class Not(AbstractMask):
    """Complement: pairs that `part` does not allow; written `~a`.

    Example:
        >>> from xsake.masks import Causal
        >>> bool((~Causal()).allows(0, 1))
        True
    """

    part: AbstractMask

    @property
    def heads(self) -> int | None:
        return self.part.heads

    def for_head(self, head: int) -> AbstractMask:
        return self if self.heads is None else negate(self.part.for_head(head))

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return ~self.part._allows(xp, q, kv, head)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return complement(xp, self.part._coverage(xp, area, head))

    def _extent(self) -> int:
        return self.part._extent()

    def __repr__(self) -> str:
        return f"~{_parenthesize(self.part)}"


def _parenthesize(mask: AbstractMask) -> str:
    return f"({mask!r})" if isinstance(mask, AbstractCombination) else repr(mask)


def join(
    operator: type[AbstractCombination], left: AbstractMask, right: AbstractMask
) -> AbstractMask:
    """Combine two masks under And or Or, flattened and without duplicates.

    The operator is applied to each member of per-head lists.
    """
    heads = common_heads((left, right))
    lists = [mask for mask in (left, right) if isinstance(mask, AbstractHeadList)]
    if lists and all(mask in lists or mask.heads is None for mask in (left, right)):
        pairs = [(left.for_head(head), right.for_head(head)) for head in range(heads or 0)]
        return lists[0]._with_members(tuple(join(operator, *pair) for pair in pairs))
    parts: dict[AbstractMask, None] = {}
    for mask in (left, right):
        parts.update(dict.fromkeys(mask.parts if isinstance(mask, operator) else (mask,)))
    return operator(tuple(parts)) if len(parts) > 1 else left


def negate(mask: AbstractMask) -> AbstractMask:
    """Return `~mask`; double negation cancels, per-head lists are negated member by member."""
    if isinstance(mask, Not):
        return mask.part
    if isinstance(mask, AbstractHeadList):
        return mask._with_members(tuple(negate(member) for member in mask.members))
    return Not(mask)
