"""Typed access to the keys of a config.json, with range checks."""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from xsake.errors import CheckpointError

MAX_SIZE = 2**24
_REQUIRED: Any = object()
_CORRECT = "correct the key, or load a checkpoint that this version supports"


@dataclasses.dataclass(frozen=True)
class ConfigReader:
    """JSON object with typed accessors; null counts as absent.

    Args:
        values: content of the file.
        defaults: of the family, for absent keys.
        path: prefix of keys in messages: "" or "rope_parameters."
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    path: str = ""

    def has(self, key: str) -> bool:
        """Whether the file has a non-null value."""
        return self.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the file has an explicit null, which for some keys differs from an absent key."""
        return key in self.values and self.values[key] is None

    def size(
        self, key: str, default: Any = _REQUIRED, *, minimum: int = 1, maximum: int = MAX_SIZE
    ) -> int:
        """Return an integer from `minimum` to `maximum`."""
        value = self._value(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.error(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def optional_size(self, key: str) -> int | None:
        """Return the value, or None if it is absent."""
        return None if self._value(key, None) is None else self.size(key)

    def number(self, key: str, default: Any = _REQUIRED, *, above: float = 0.0) -> float:
        """Return a number above `above` in the range of float32."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not above < value < 1e38:
            raise self.error(key, value, f"a finite number above {above:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """Return the value, or None if it is absent."""
        return None if self._value(key, None) is None else self.number(key)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """Return a boolean."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false")
        return value

    def choice(self, key: str, choices: Iterable[str], default: Any = _REQUIRED) -> str:
        """Return one of several strings."""
        value = self._value(key, default)
        allowed = tuple(choices)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(key, value, "one of " + ", ".join(allowed))
        return value

    def choices(self, key: str, choices: Iterable[str], *, count: int) -> tuple[str, ...]:
        """Return a list of exactly `count` allowed strings."""
        value, allowed = self._value(key, _REQUIRED), tuple(choices)
        if not isinstance(value, list) or len(value) != count:
            got = f"{len(value)} entries" if isinstance(value, list) else value
            raise self.error(key, got, f"a list of {count}: one for every layer")
        wrong = [word for word in value if not (isinstance(word, str) and word in allowed)]
        if wrong:
            raise self.error(key, wrong[0], "entries out of " + ", ".join(allowed))
        return tuple(value)

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> "ConfigReader | None":
        """Return a nested object."""
        value = self._value(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, value, "an object or null")
        return ConfigReader(value, defaults or {}, f"{self.path}{key}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """Return a reader with the defaults of a family."""
        return dataclasses.replace(self, defaults=defaults)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return zero or more token ids."""
        value = self._value(key, None)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(item) is not int or abs(item) > MAX_SIZE for item in listed):
            raise self.error(key, value, "null, an integer or a list of integers")
        return tuple(listed)

    def error(self, key: str, got: Any, expected: str, *, fix: str = _CORRECT) -> CheckpointError:
        """Return the error for an invalid key."""
        name = key if key.replace(".", "_").isidentifier() else repr(key)[:80]
        text = "nothing" if got is _REQUIRED or got is None else reprlib.repr(got)
        return CheckpointError(
            f"config.json: {self.path}{name} is invalid or unsupported",
            got=text,
            expected=expected,
            fix=fix,
        )

    def _value(self, key: str, default: Any) -> Any:
        for value in (self.values.get(key), self.defaults.get(key)):
            if value is not None:
                return value
        return default
