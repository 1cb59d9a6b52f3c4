"""Differences between the supported releases of JAX: jax 0.8 to 0.12.

All other modules use the API of the newest release. An API that an older release lacks is wrapped
here, by a test for the feature rather than for the version, newest first.
"""

from collections.abc import Iterable
from typing import Any

import jax
from jax import lax


def is_release(names: Iterable[str], version: str) -> bool:
    """Whether a version of JAX belongs to one of the named releases.

    Example:
        >>> is_release(("0.12",), "0.12.0.1"), is_release(("0.12.0",), "0.12.1")
        (True, False)
    """
    return any(version == name or version.startswith(f"{name}.") for name in names)


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes that an array varies over; none outside `shard_map`, or without its checks."""
    kind: Any = jax.typeof(x)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma


def vary_over(x: Any, axes: tuple[str, ...]) -> Any:
    """The same array, typed as varying over further mesh axes."""
    if hasattr(lax, "pcast"):
        return lax.pcast(x, axes, to="varying")
    return getattr(lax, "pvary")(x, axes)  # noqa: B009 - no attribute of the newest release
