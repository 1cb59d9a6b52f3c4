"""Combinations of masks: And, Or, Not, and PerHead, which evaluates equal structures at once."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from xsake.errors import MaskError
from xsake.masks.base import AbstractMask, AbstractParametric
from xsake.masks.coverage import Answer, Codes, Rectangles, complement, intersect, look_up, unite
from xsake.masks.patterns import AbstractBand, Window


def common_heads(masks: tuple[AbstractMask, ...]) -> int | None:
    """Return the head count of all per-head masks; None if there are none."""
    counts = {mask.heads for mask in masks} - {None}
    if len(counts) > 1:
        raise MaskError(
            "combine-heads",
            "cannot combine masks with different numbers of heads",
            got=" and ".join(f"{mask.heads} heads" for mask in masks if mask.heads is not None),
            expected="equal head counts, or masks without heads",
        )
    return counts.pop() if counts else None


@dataclasses.dataclass(frozen=True, repr=False)
class AbstractCombination(AbstractMask):
    """Two or more masks under one associative operator; `join` flattens nested ones."""

    parts: tuple[AbstractMask, ...]

    symbol: ClassVar[str]
    _combine: ClassVar[Callable[[Answer, Answer], Answer]]
    _combine_codes: ClassVar[Callable[[ModuleType, Codes, Codes], Codes]]
    _combine_limits: ClassVar[Callable[..., int]]  # of bands

    def __post_init__(self) -> None:
        common_heads(self.parts)

    @property
    def heads(self) -> int | None:
        return common_heads(self.parts)

    def _for_head(self, head: int) -> AbstractMask:
        parts = (part.for_head(head) for part in self.parts)
        return functools.reduce(functools.partial(join, type(self)), parts)

    @functools.cached_property
    def _fused(self) -> tuple[AbstractMask, ...]:
        """Parts with all bands fused into one: fewer operations and exact coverage."""
        bands = [part for part in self.parts if isinstance(part, AbstractBand)]
        if len(bands) < 2:
            return self.parts
        # Every band contains the diagonal, so unions and intersections of bands are bands.
        band = Window(*map(self._combine_limits, *(band._params() for band in bands)))
        return (band, *(part for part in self.parts if not isinstance(part, AbstractBand)))

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        answers = (part._allows(xp, q, kv, head) for part in self._fused)
        return functools.reduce(self._combine, answers)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        codes = (part._coverage(xp, area, head) for part in self._fused)
        return functools.reduce(functools.partial(self._combine_codes, xp), codes)

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
    _combine = staticmethod(operator.and_)
    _combine_codes = staticmethod(intersect)
    _combine_limits = staticmethod(min)


class Or(AbstractCombination):
    """Union: pairs allowed by at least one part; written `a | b`.

    Example:
        >>> from xsake.masks import Sinks, Window
        >>> Sinks(4) | Window(left=255, right=0)
        Sinks(count=4) | Window(left=255, right=0)
    """

    symbol = "|"
    _combine = staticmethod(operator.or_)
    _combine_codes = staticmethod(unite)
    _combine_limits = staticmethod(max)


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

    def _for_head(self, head: int) -> AbstractMask:
        return negate(self.part.for_head(head))

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return ~self.part._allows(xp, q, kv, head)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return complement(xp, self.part._coverage(xp, area, head))

    def __repr__(self) -> str:
        return f"~{_parenthesize(self.part)}"


@dataclasses.dataclass(frozen=True, repr=False)
class PerHead(AbstractMask):
    """One mask per head; `&`, `|` and `~` apply to each member.

    Heads whose masks differ only in parameters (`Window(127, 0)` and `Window(1023, 0)`) are
    evaluated together, with the parameters indexed by head.

    Args:
        members: the mask of each head, without per-head rules.

    Example:
        >>> from xsake.masks import Causal, Window
        >>> PerHead([Causal()] * 3 + [Window(left=8, right=0)])
        PerHead([Causal()] * 3 + [Window(left=8, right=0)])
    """

    members: Sequence[AbstractMask]

    def __post_init__(self) -> None:
        members = tuple(self.members)
        if not members or not all(
            isinstance(member, AbstractMask) and member.heads is None for member in members
        ):
            raise MaskError(
                "per-head-count",
                "PerHead needs one mask per head",
                got=repr(list(members)),
                expected="at least one mask, none with per-head rules",
            )
        object.__setattr__(self, "members", members)

    @property
    def heads(self) -> int | None:
        return len(self.members)

    def _for_head(self, head: int) -> AbstractMask:
        return self.members[head]

    @functools.cached_property
    def _families(self) -> "list[_Family]":
        splits = [_split_params(member) for member in self.members]
        families = []
        for structure in dict.fromkeys(structure for structure, _ in splits):
            is_member = np.array([key == structure for key, _ in splits])
            _, example = splits[int(np.argmax(is_member))]
            # Other heads take the example's parameters; their results are never selected.
            heads = [params if key == structure else example for key, params in splits]
            params = [
                [
                    values[0] if len(set(values)) == 1 else np.array(values, np.int32)
                    for values in zip(*leaf, strict=True)
                ]
                for leaf in zip(*heads, strict=True)
            ]
            families.append(_Family(structure, params, is_member))
        return families

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self._evaluate(xp, head, lambda mask: mask._allows(xp, q, kv, None))

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return self._evaluate(xp, head, lambda mask: mask._coverage(xp, area, None))

    def _evaluate(self, xp: ModuleType, head: Any, evaluate: Callable[[AbstractMask], Any]) -> Any:
        """Evaluate every family and select the result of each head's family."""
        if xp is np and head.size == 1:
            return evaluate(self.members[head.item()])
        answers = [evaluate(family.bind(xp, head)) for family in self._families]
        chosen = answers[0]
        for family, answer in zip(self._families[1:], answers[1:], strict=True):
            chosen = xp.where(look_up(xp, family.is_member, head), answer, chosen)
        return chosen

    def __repr__(self) -> str:
        lists: list[str] = []
        for member, run in itertools.groupby(self.members):
            count = len(list(run))
            if count == 1 and lists and not lists[-1].endswith(tuple("0123456789")):
                lists[-1] = f"{lists[-1][:-1]}, {member!r}]"
            else:
                lists.append(f"[{member!r}]" + (f" * {count}" if count > 1 else ""))
        return f"PerHead({' + '.join(lists)})"


def _parenthesize(mask: AbstractMask) -> str:
    return f"({mask!r})" if isinstance(mask, AbstractCombination) else repr(mask)


def join(
    operator: type[AbstractCombination], left: AbstractMask, right: AbstractMask
) -> AbstractMask:
    """Combine two masks under And or Or, flattened and without duplicates."""
    heads = common_heads((left, right))
    lists = [mask for mask in (left, right) if isinstance(mask, PerHead)]
    if lists and all(mask in lists or mask.heads is None for mask in (left, right)):
        pairs = [(left.for_head(head), right.for_head(head)) for head in range(heads or 0)]
        return PerHead([join(operator, *pair) for pair in pairs])
    parts: dict[AbstractMask, None] = {}
    for mask in (left, right):
        parts.update(dict.fromkeys(mask.parts if isinstance(mask, operator) else (mask,)))
    return operator(tuple(parts)) if len(parts) > 1 else left


def negate(mask: AbstractMask) -> AbstractMask:
    """Return `~mask`; double negation cancels."""
    if isinstance(mask, Not):
        return mask.part
    if isinstance(mask, PerHead):
        return PerHead([negate(member) for member in mask.members])
    return Not(mask)


def _split_params(mask: AbstractMask) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """Return the structure of a mask, without parameters, and the parameters of each leaf.

    A structure is the type of a leaf, (type, *structures) of a combination, or a mask without
    parameters. Bands are Windows, so that more heads share a structure.
    """
    if isinstance(mask, AbstractParametric):
        return Window if isinstance(mask, AbstractBand) else type(mask), (mask._params(),)
    if not isinstance(mask, AbstractCombination | Not):
        return mask, ()
    parts = mask._fused if isinstance(mask, AbstractCombination) else (mask.part,)
    structures, params = zip(*map(_split_params, parts), strict=True)
    if len(parts) == 1 and not isinstance(mask, Not):
        return structures[0], params[0]
    return (type(mask), *structures), tuple(itertools.chain(*params))


def _bind_params(structure: Any, params: Iterator[tuple[Any, ...]]) -> AbstractMask:
    """Return a mask of this structure; the parameters of a leaf may be arrays."""
    if isinstance(structure, AbstractMask):
        return structure
    if not isinstance(structure, tuple):
        return _BoundMask(structure, next(params))
    mask_type, *parts = structure
    bound = tuple(_bind_params(part, params) for part in parts)
    return Not(*bound) if mask_type is Not else mask_type(bound)


class _BoundMask(AbstractMask):
    """Parametric mask whose parameters are arrays; used during one evaluation."""

    def __init__(self, mask_type: type[AbstractParametric], params: tuple[Any, ...]):
        self.mask_type, self.params = mask_type, params

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self.mask_type._rule(xp, q, kv, *self.params)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return self.mask_type._cover(xp, area, *self.params)


class _Family(NamedTuple):
    """Heads whose masks are equal up to parameters."""

    structure: Any
    params: list[list[int | np.ndarray]]  # of each leaf; an int if all heads of the family agree
    is_member: np.ndarray  # [heads] bool

    def bind(self, xp: ModuleType, head: Any) -> AbstractMask:
        """Return the mask of the family with each head's parameters."""
        params = (
            tuple(x if isinstance(x, int) else look_up(xp, x, head) for x in leaf)
            for leaf in self.params
        )
        return _bind_params(self.structure, params)
