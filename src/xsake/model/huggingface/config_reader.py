"""Typed access to the keys of a config.json."""

import dataclasses
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from xsake.errors import CheckpointError

MAX_SIZE = 2**24
REQUIRED: Any = object()
_CORRECT = "correct the key, or load a checkpoint that this version supports"


class Kind(NamedTuple):
    """Values that a key accepts, and their description."""

    accepts: Callable[[Any], bool]
    expected: str


def sizes(minimum: int = 1, maximum: int = MAX_SIZE) -> Kind:
    """Integers in a range."""
    return Kind(
        lambda value: type(value) is int and minimum <= value <= maximum,
        f"an integer from {minimum} to {maximum}",
    )


def numbers(above: float = 0.0) -> Kind:
    """Numbers in the range of float32."""
    return Kind(
        lambda value: type(value) in (int, float) and above < value < 1e38,
        f"a finite number above {above:g}",
    )


def one_of(names: Iterable[str]) -> Kind:
    """One of several strings."""
    names = tuple(names)
    return Kind(
        lambda value: isinstance(value, str) and value in names, f"one of {', '.join(names)}"
    )


def one_per_layer(names: Iterable[str], count: int) -> Kind:
    """A list of strings, one for every layer."""
    each = one_of(names)
    return Kind(
        lambda value: isinstance(value, list) and len(value) == count and all(map(each[0], value)),
        f"a list of {count}, one for every layer: {each.expected}",
    )


SIZE, NUMBER = sizes(), numbers()
FLAG = Kind(lambda value: type(value) is bool, "true or false")
OBJECT = Kind(lambda value: isinstance(value, dict), "an object or null")
TOKEN_IDS = Kind(
    lambda value: all(type(x) is int and abs(x) <= MAX_SIZE for x in as_list(value)),
    "null, an integer or a list of integers",
)


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, and any other value as its only entry."""
    return value if isinstance(value, list) else [value]


@dataclasses.dataclass(frozen=True)
class ConfigReader:
    """JSON object whose null values count as absent."""

    values: Mapping[str, Any]  # content of the file
    # of the family, for absent keys
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: str = ""  # prefix of keys in messages: "" or "rope_parameters."

    def has(self, key: str) -> bool:
        """Whether the file has a non-null value."""
        return self.values.get(key) is not None

    def read(self, key: str, kind: Kind, default: Any = REQUIRED) -> Any:
        """Return the value of the file, of the family or the default; None only by default."""
        given = (self.values.get(key), self.defaults.get(key), default)
        value = next((value for value in given if value is not None), None)
        if value is not None and not kind.accepts(value):
            raise self.error(key, value, kind.expected)
        return value

    def section(self, key: str) -> "ConfigReader | None":
        """Return a nested object."""
        value = self.read(key, OBJECT, None)
        return None if value is None else ConfigReader(value, path=f"{self.path}{key}.")

    def error(self, key: str, got: Any, expected: str, *, fix: str = _CORRECT) -> CheckpointError:
        """Return the error for an invalid key."""
        name = key if key.replace(".", "_").isidentifier() else repr(key)[:80]
        return CheckpointError(
            "config-key", f"config.json: {self.path}{name} is invalid or unsupported",
            got="nothing" if got is REQUIRED or got is None else reprlib.repr(got),
            expected=expected, fix=fix,
        )  # fmt: skip
