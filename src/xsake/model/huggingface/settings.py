"""The keys of a config.json, read one by one: each has its type and range, or a clean refusal."""

import dataclasses
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from xsake.errors import CheckpointError

MAX_SIZE = 2**24
_REQUIRED: Any = object()
_CORRECT = "correct the key, or load a checkpoint that this version supports"


@dataclasses.dataclass(frozen=True)
class Settings:
    """A JSON object whose keys are asked for by type; a null counts as absent.

    Args:
        values: what the file says.
        defaults: what a family assumes for keys that are absent.
        place: which object of the file this is, for messages: "" or "rope_parameters."
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    place: str = ""

    def has(self, key: str) -> bool:
        """Whether the file itself says something about it."""
        return self.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Whether the file says null, which for some keys is not the same as saying nothing."""
        return key in self.values and self.values[key] is None

    def size(
        self, key: str, default: Any = _REQUIRED, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """An integer from `least` to `most`."""
        value = self._value(key, default)
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, value, f"an integer from {least} to {most}")
        return value

    def optional_size(self, key: str) -> int | None:
        """The same, or None if it is absent."""
        return None if self._value(key, None) is None else self.size(key)

    def number(self, key: str, default: Any = _REQUIRED, *, above: float = 0.0) -> float:
        """A number above `above` that fits a float32."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not above < value < 1e38:
            raise self.refusal(key, value, f"a finite number above {above:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """The same, or None if it is absent."""
        return None if self._value(key, None) is None else self.number(key)

    def flag(self, key: str, default: Any = _REQUIRED) -> bool:
        """True or false."""
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.refusal(key, value, "true or false")
        return value

    def choice(self, key: str, choices: Iterable[str], default: Any = _REQUIRED) -> str:
        """One of some words."""
        value = self._value(key, default)
        known = tuple(choices)
        if not isinstance(value, str) or value not in known:
            raise self.refusal(key, value, "one of " + ", ".join(known))
        return value

    def choices(self, key: str, choices: Iterable[str], *, count: int) -> tuple[str, ...]:
        """Exactly `count` of some words."""
        value, known = self._value(key, _REQUIRED), tuple(choices)
        if not isinstance(value, list) or len(value) != count:
            got = f"{len(value)} entries" if isinstance(value, list) else value
            raise self.refusal(key, got, f"a list of {count}: one for every layer")
        wrong = [word for word in value if not (isinstance(word, str) and word in known)]
        if wrong:
            raise self.refusal(key, wrong[0], "entries out of " + ", ".join(known))
        return tuple(value)

    def section(self, key: str, defaults: Mapping[str, Any] | None = None) -> "Settings | None":
        """An object inside this one."""
        value = self._value(key, None)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object or null")
        return Settings(value, defaults or {}, f"{self.place}{key}.")

    def with_defaults(self, defaults: Mapping[str, Any]) -> "Settings":
        """The same file, read by a family that assumes these."""
        return dataclasses.replace(self, defaults=defaults)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """No, one or several ids of tokens."""
        value = self._value(key, None)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(item) is not int or abs(item) > MAX_SIZE for item in listed):
            raise self.refusal(key, value, "null, an integer or a list of integers")
        return tuple(listed)

    def refusal(self, key: str, got: Any, expected: str, *, fix: str = _CORRECT) -> CheckpointError:
        """The error that says why a key cannot be used."""
        name = key if key.replace(".", "_").isidentifier() else repr(key)[:80]
        shown = "nothing" if got is _REQUIRED or got is None else reprlib.repr(got)
        return CheckpointError(
            f"config.json: {self.place}{name} cannot be used", got=shown, expected=expected, fix=fix
        )

    def _value(self, key: str, default: Any) -> Any:
        for value in (self.values.get(key), self.defaults.get(key)):
            if value is not None:
                return value
        return default
