"""Backends that are imported when they are first asked: Pallas takes a third as long as JAX."""

import dataclasses
import importlib
from typing import Any

# Pallas adds settings to those that JAX knows a trace by. Backends are first asked in the middle of
# a trace: settings that came only then would make it another one, to be compiled a second time.
import jax.experimental.pallas.fuser  # noqa: F401


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
