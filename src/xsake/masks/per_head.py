"""Owns the mask that gives each head its own rule, and evaluates many heads at once."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from xsake.errors import MaskError
from xsake.masks.algebra import AbstractCombination, AbstractHeadList, Not
from xsake.masks.arrays import UNBOUNDED, Answer, Codes, look_up
from xsake.masks.bands import AbstractBand, Window
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import Rectangles
from xsake.masks.structured import AbstractStructured


@dataclasses.dataclass(frozen=True, repr=False)
class PerHead(AbstractHeadList):
    """One mask per head.

    Heads whose masks differ only in numbers (`Window(127, 0)` and `Window(1023, 0)`, say, in
    whatever combination) are evaluated together, with the numbers looked up by head.

    Args:
        members: the mask of each head, none of them with heads of its own.

    Example:
        >>> from xsake.masks import Causal, Window
        >>> PerHead([Causal()] * 3 + [Window(left=8, right=0)])
        PerHead([Causal()] * 3 + [Window(left=8, right=0)])
    """

    def __post_init__(self) -> None:
        members = tuple(self.members)
        if not members or not all(
            isinstance(member, AbstractMask) and member.heads is None for member in members
        ):
            raise MaskError(
                "PerHead needs one mask per head",
                got=repr(list(members)),
                expected="at least one mask, none of them with heads of its own",
            )
        object.__setattr__(self, "members", members)

    @property
    def heads(self) -> int | None:
        return len(self.members)

    def for_head(self, head: int) -> AbstractMask:
        self._check_head(head)
        return self.members[head]

    def _with_members(self, members: Sequence[AbstractMask]) -> "PerHead":
        return PerHead(members)

    @functools.cached_property
    def _families(self) -> "tuple[_Family, ...]":
        simplest = [_simplest(member) for member in self.members]
        kinds = dict.fromkeys(map(_skeleton, simplest))
        return tuple(_Family.of(kind, simplest) for kind in kinds)

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        if xp is np and head.size == 1:
            return self.members[head.item()]._allows(xp, q, kv, None)
        rules = (family.bound(xp, head) for family in self._families)
        return self._selected(xp, head, [rule._allows(xp, q, kv, None) for rule in rules])

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        if xp is np and head.size == 1:
            return self.members[head.item()]._coverage(xp, area, None)
        rules = (family.bound(xp, head) for family in self._families)
        return self._selected(xp, head, [rule._coverage(xp, area, None) for rule in rules])

    def _selected(self, xp: ModuleType, head: Any, answers: list[Any]) -> Any:
        """For each head the answer of its own family."""
        chosen = answers[0]
        for family, answer in zip(self._families[1:], answers[1:], strict=True):
            chosen = xp.where(look_up(xp, family.is_member, head), answer, chosen)
        return chosen

    def _extent(self) -> int:
        return max(member._extent() for member in self.members)

    def __repr__(self) -> str:
        lists: list[str] = []
        for member, run in itertools.groupby(self.members):
            count = len(list(run))
            if count == 1 and lists and not lists[-1].endswith(tuple("0123456789")):
                lists[-1] = f"{lists[-1][:-1]}, {member!r}]"
            else:
                lists.append(f"[{member!r}]" + (f" * {count}" if count > 1 else ""))
        return f"PerHead({' + '.join(lists)})"


@dataclasses.dataclass(frozen=True, eq=False)
class _Family:
    """Heads whose masks are equal up to numbers: one of the masks, and the numbers by head."""

    example: AbstractMask
    numbers: tuple[int | np.ndarray, ...]  # a plain int where all heads of the family agree
    is_member: np.ndarray  # [heads] bool

    @classmethod
    def of(cls, kind: Any, masks: Sequence[AbstractMask]) -> "_Family":
        is_member = np.array([_skeleton(mask) == kind for mask in masks])
        example = masks[int(np.argmax(is_member))]
        # Other heads get the example's numbers: what they compute here is never selected.
        own = [mask if _skeleton(mask) == kind else example for mask in masks]
        columns = zip(*map(_numbers, own), strict=True)
        numbers = (
            column[0] if len(set(column)) == 1 else np.array(column, np.int32) for column in columns
        )
        return cls(example, tuple(numbers), is_member)

    def bound(self, xp: ModuleType, head: Any) -> AbstractMask:
        """The example with each head's own numbers in place of its own."""
        looked_up = (
            number if isinstance(number, int) else look_up(xp, number, head)
            for number in self.numbers
        )
        return _bound(self.example, looked_up)


class _Bound(AbstractMask):
    """The formulas of a structured mask with numbers that are arrays; lives during one call."""

    def __init__(self, kind: type[AbstractStructured], numbers: tuple[Any, ...]):
        self.kind, self.numbers = kind, numbers

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self.kind._rule(xp, q, kv, *self.numbers)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return self.kind._cover(xp, area, *self.numbers)


def _simplest(mask: AbstractMask) -> AbstractMask:
    """The same rule with every band a Window, so that more heads look alike."""
    if isinstance(mask, AbstractBand):
        return Window(*(None if limit == UNBOUNDED else limit for limit in mask._numbers()))
    if isinstance(mask, AbstractCombination):
        parts = tuple(_simplest(part) for part in mask._folded)
        return type(mask)(parts) if len(parts) > 1 else parts[0]
    return Not(_simplest(mask.part)) if isinstance(mask, Not) else mask


def _skeleton(mask: AbstractMask) -> Any:
    """What is left of a mask without its numbers; equal for masks of one family."""
    if isinstance(mask, AbstractStructured):
        return type(mask)
    if isinstance(mask, AbstractCombination):
        return type(mask), *map(_skeleton, mask.parts)
    return (Not, _skeleton(mask.part)) if isinstance(mask, Not) else mask


def _numbers(mask: AbstractMask) -> tuple[int, ...]:
    """All numbers of a mask, in the order in which `_bound` puts them back."""
    if isinstance(mask, AbstractStructured):
        return mask._numbers()
    if isinstance(mask, AbstractCombination):
        return tuple(itertools.chain.from_iterable(map(_numbers, mask.parts)))
    return _numbers(mask.part) if isinstance(mask, Not) else ()


def _bound(mask: AbstractMask, numbers: Iterator[Any]) -> AbstractMask:
    if isinstance(mask, AbstractStructured):
        return _Bound(type(mask), tuple(itertools.islice(numbers, len(mask._numbers()))))
    if isinstance(mask, AbstractCombination):
        return type(mask)(tuple(_bound(part, numbers) for part in mask.parts))
    return Not(_bound(mask.part, numbers)) if isinstance(mask, Not) else mask
