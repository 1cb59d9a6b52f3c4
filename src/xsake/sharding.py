"""Logical axis rules: map named array axes to mesh axes."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xsake.errors import ArgumentError

ShardingRules = Mapping[str, str | tuple[str, ...] | None]
"""Maps logical axes to mesh axes; None means replicated."""


def named_sharding(
    path: str, names: Sequence[str], shape: Sequence[int], mesh: Mesh, rules: ShardingRules
) -> NamedSharding:
    """Return the NamedSharding of an array; axes without a rule are replicated.

    Args:
        path: name of the array, for errors.
        names: logical axis names.
        shape: axis sizes.
        mesh: device mesh.
        rules: mesh axes by logical axis.

    Example:
        >>> import jax
        >>> from jax.sharding import Mesh
        >>> mesh = Mesh(jax.devices()[:1], ("tensor",))
        >>> axes, rules = ("vocab", "embed"), {"vocab": "tensor"}
        >>> tuple(named_sharding("embedding", axes, (96, 48), mesh, rules).spec)
        ('tensor', None)
    """
    taken: list[str] = []
    for name, size in zip(names, shape, strict=True):
        axes = mesh_axes(name, rules)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ArgumentError(
                "axis-uneven",
                f"the axis {name!r} of {path} cannot be sharded evenly",
                got=f"{size} over {parts} devices ({', '.join(axes)})",
                expected=f"a multiple of {parts}",
                fix=f"map {name!r} to None in the rules, or change the mesh",
            )
        taken += axes
    if len(set(taken)) != len(taken):
        raise ArgumentError(
            "axis-twice",
            f"two axes of {path} map to the same mesh axis",
            got=", ".join(f"{name}: {rules.get(name)}" for name in names),
            expected="each mesh axis at most once per array",
            fix="map one of the logical axes to None",
        )
    return NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in names)))


def mesh_axes(name: str, rules: ShardingRules) -> tuple[str, ...]:
    """Return the mesh axes of a logical axis.

    Example:
        >>> mesh_axes("batch", {"batch": ("data", "fsdp")}), mesh_axes("layer", {})
        (('data', 'fsdp'), ())
    """
    axes = rules.get(name)
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def check_mesh_axes(name: str, rules: ShardingRules, mesh: Mesh) -> None:
    """Raise unless the mesh has every axis of the rule."""
    for axis in mesh_axes(name, rules):
        if axis not in mesh.axis_names:
            raise ArgumentError(
                "axis-not-in-mesh",
                f"the sharding rule of {name!r} names an axis that is not in the mesh",
                got=repr(axis),
                expected="one of " + ", ".join(map(str, mesh.axis_names)),
                fix="add the axis to the mesh, or change the rule",
            )
