"""Owns the pattern of masks that are a formula over a few integers, checked and stackable."""

import abc
import operator
from types import ModuleType
from typing import Any

from xsake.errors import MaskError
from xsake.masks.arrays import UNBOUNDED, Answer, Codes
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import Rectangles


class AbstractStructured(AbstractMask):
    """A mask whose rule is a formula over `_numbers()`.

    The formulas take the numbers as arguments, so that masks of several heads which differ only
    in numbers are one evaluation with arrays of numbers instead of one evaluation per head.
    """

    @abc.abstractmethod
    def _numbers(self) -> tuple[int, ...]:
        """The int32 numbers the formulas depend on."""

    @staticmethod
    @abc.abstractmethod
    def _rule(*arguments: Any, **named: Any) -> Answer:
        """`allows` as a formula: `_rule(xp, q, kv, *numbers)`."""

    @staticmethod
    @abc.abstractmethod
    def _cover(*arguments: Any, **named: Any) -> Codes:
        """`coverage` as a formula: `_cover(xp, area, *numbers)`."""

    def _allows(self, xp: ModuleType, q: Any, kv: Any, head: Any) -> Answer:
        return self._rule(xp, q, kv, *self._numbers())

    def _coverage(self, xp: ModuleType, area: Rectangles, head: Any) -> Codes:
        return self._cover(xp, area, *self._numbers())


def store_int(mask: AbstractMask, name: str, *, least: int, most: int = UNBOUNDED) -> None:
    """Replace field `name` of a frozen mask by a plain int after checking its range."""
    value = getattr(mask, name)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise MaskError(
            f"{type(mask).__name__} needs an integer `{name}` in its range",
            got=f"{name}={value!r}",
            expected=f"an integer in {least}..{most}",
        )
    object.__setattr__(mask, name, number)
