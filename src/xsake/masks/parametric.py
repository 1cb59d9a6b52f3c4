"""Base class of masks defined by a few integer parameters."""

import abc
import operator
from types import ModuleType
from typing import Any

from xsake.errors import MaskError
from xsake.masks.arrays import UNBOUNDED, Answer, Codes
from xsake.masks.base import AbstractMask
from xsake.masks.coverage import Rectangles


class AbstractParametric(AbstractMask):
    """Mask whose rule is a function of positions and `_params()`.

    The rules take the parameters as arguments, so masks of several heads that differ only in
    parameters are evaluated at once, with arrays of parameters.
    """

    @abc.abstractmethod
    def _params(self) -> tuple[int, ...]:
        """Return the int32 parameters."""

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


def store_int(mask: AbstractMask, name: str, *, min_value: int, max_value: int = UNBOUNDED) -> None:
    """Check the range of field `name` of a frozen mask and store it as an int."""
    value = getattr(mask, name)
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not min_value <= number <= max_value:
        raise MaskError(
            f"{type(mask).__name__} needs an integer `{name}` in its range",
            got=f"{name}={value!r}",
            expected=f"an integer in {min_value}..{max_value}",
        )
    object.__setattr__(mask, name, number)
