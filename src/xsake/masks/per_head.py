"""Per-head masks, evaluated for all heads of equal structure at once."""

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
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import Rectangles
from xsake.masks.local import AbstractBand, Window
from xsake.masks.parametric import AbstractParametric


@dataclasses.dataclass(frozen=True, repr=False)
class PerHead(AbstractHeadList):
    """One mask per head.

    Heads whose masks differ only in parameters (`Window(127, 0)` and `Window(1023, 0)`) are
    evaluated together, with the parameters indexed by head.

    Args:
        members: the mask of each head, without per-head rules.

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
                expected="at least one mask, none with per-head rules",
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
        canonical = [_canonicalize(member) for member in self.members]
        structures = dict.fromkeys(map(_structure, canonical))
        return tuple(_Family.build(structure, canonical) for structure in structures)

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        if xp is np and head.size == 1:
            return self.members[head.item()]._allows(xp, q, kv, None)
        rules = (family.bind(xp, head) for family in self._families)
        return self._select(xp, head, [rule._allows(xp, q, kv, None) for rule in rules])

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        if xp is np and head.size == 1:
            return self.members[head.item()]._coverage(xp, area, None)
        rules = (family.bind(xp, head) for family in self._families)
        return self._select(xp, head, [rule._coverage(xp, area, None) for rule in rules])

    def _select(self, xp: ModuleType, head: Any, answers: list[Any]) -> Any:
        """Select the result of each head's family."""
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
    """Heads whose masks are equal up to parameters: an example mask and parameters by head."""

    example: AbstractMask
    params: tuple[int | np.ndarray, ...]  # an int if all heads of the family agree
    is_member: np.ndarray  # [heads] bool

    @classmethod
    def build(cls, structure: Any, masks: Sequence[AbstractMask]) -> "_Family":
        is_member = np.array([_structure(mask) == structure for mask in masks])
        example = masks[int(np.argmax(is_member))]
        # Other heads take the example's parameters; their results are never selected.
        members = [mask if _structure(mask) == structure else example for mask in masks]
        columns = zip(*map(_collect_params, members), strict=True)
        params = (
            column[0] if len(set(column)) == 1 else np.array(column, np.int32) for column in columns
        )
        return cls(example, tuple(params), is_member)

    def bind(self, xp: ModuleType, head: Any) -> AbstractMask:
        """Return the example mask with each head's parameters."""
        params = (
            param if isinstance(param, int) else look_up(xp, param, head) for param in self.params
        )
        return _bind_params(self.example, params)


class _BoundMask(AbstractMask):
    """Parametric mask whose parameters are arrays; used during one evaluation."""

    def __init__(self, mask_type: type[AbstractParametric], params: tuple[Any, ...]):
        self.mask_type, self.params = mask_type, params

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self.mask_type._rule(xp, q, kv, *self.params)

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return self.mask_type._cover(xp, area, *self.params)


def _canonicalize(mask: AbstractMask) -> AbstractMask:
    """Return an equal mask with every band as a Window, so that more heads share a structure."""
    if isinstance(mask, AbstractBand):
        return Window(*(None if limit == UNBOUNDED else limit for limit in mask._params()))
    if isinstance(mask, AbstractCombination):
        parts = tuple(_canonicalize(part) for part in mask._fused)
        return type(mask)(parts) if len(parts) > 1 else parts[0]
    return Not(_canonicalize(mask.part)) if isinstance(mask, Not) else mask


def _structure(mask: AbstractMask) -> Any:
    """Return the mask without its parameters; equal for masks of one family."""
    if isinstance(mask, AbstractParametric):
        return type(mask)
    if isinstance(mask, AbstractCombination):
        return type(mask), *map(_structure, mask.parts)
    return (Not, _structure(mask.part)) if isinstance(mask, Not) else mask


def _collect_params(mask: AbstractMask) -> tuple[int, ...]:
    """Return all parameters of a mask, in the order of `_bind_params`."""
    if isinstance(mask, AbstractParametric):
        return mask._params()
    if isinstance(mask, AbstractCombination):
        return tuple(itertools.chain.from_iterable(map(_collect_params, mask.parts)))
    return _collect_params(mask.part) if isinstance(mask, Not) else ()


def _bind_params(mask: AbstractMask, params: Iterator[Any]) -> AbstractMask:
    if isinstance(mask, AbstractParametric):
        return _BoundMask(type(mask), tuple(itertools.islice(params, len(mask._params()))))
    if isinstance(mask, AbstractCombination):
        return type(mask)(tuple(_bind_params(part, params) for part in mask.parts))
    return Not(_bind_params(mask.part, params)) if isinstance(mask, Not) else mask
