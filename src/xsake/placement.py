"""Which mesh axes each logical axis of an array takes, by rules; an axis is cut evenly or not."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xsake.errors import ArgumentError

Rules = Mapping[str, str | tuple[str, ...] | None]
"""From logical axes to mesh axes; None is on every device."""


def sharding_of(
    path: str, names: Sequence[str], shape: Sequence[int], mesh: Mesh, rules: Rules
) -> NamedSharding:
    """How one array lies on the devices of a mesh; an axis without a rule is on every device.

    Args:
        path: where the array is, for messages.
        names: logical axes.
        shape: sizes of these.
        mesh: the devices.
        rules: which mesh axes a logical axis takes.

    Example:
        >>> import jax
        >>> from jax.sharding import Mesh
        >>> mesh = Mesh(jax.devices()[:1], ("tensor",))
        >>> axes, rules = ("vocab", "embed"), {"vocab": "tensor"}
        >>> tuple(sharding_of("embedding", axes, (96, 48), mesh, rules).spec)
        ('tensor', None)
    """
    taken: list[str] = []
    for name, size in zip(names, shape, strict=True):
        axes = mesh_axes(name, rules)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ArgumentError(
                f"the axis {name!r} of {path} cannot be cut evenly",
                got=f"{size} over {parts} devices ({', '.join(axes)})",
                expected=f"a multiple of {parts}",
                fix=f"map {name!r} to None in the rules, or change the mesh",
            )
        taken += axes
    if len(set(taken)) != len(taken):
        raise ArgumentError(
            f"two axes of {path} would take the same mesh axis",
            got=", ".join(f"{name}: {rules.get(name)}" for name in names),
            expected="every mesh axis at most once in an array",
            fix="map one of the logical axes to None",
        )
    return NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in names)))


def mesh_axes(name: str, rules: Rules) -> tuple[str, ...]:
    """The mesh axes that a logical axis takes.

    Example:
        >>> mesh_axes("batch", {"batch": ("data", "fsdp")}), mesh_axes("layer", {})
        (('data', 'fsdp'), ())
    """
    axes = rules.get(name)
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def require_mesh_axes(name: str, rules: Rules, mesh: Mesh) -> None:
    """Raise unless the mesh has every axis that a rule names."""
    for axis in mesh_axes(name, rules):
        if axis not in mesh.axis_names:
            raise ArgumentError(
                f"the sharding rule of {name!r} names an axis that the mesh lacks",
                got=repr(axis),
                expected="one of " + ", ".join(map(str, mesh.axis_names)),
                fix="give the mesh such an axis, or change the rule",
            )
