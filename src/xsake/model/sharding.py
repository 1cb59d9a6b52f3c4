"""Which device axis each logical axis of a parameter takes: rules, checked against a mesh."""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xsake.errors import ArgumentError

LOGICAL_AXES = (
    "layer", "vocab", "position", "embed", "q_heads", "kv_heads", "head_dim", "mlp",
    "branch", "run", "summary",
)  # fmt: skip

Rules = Mapping[str, str | tuple[str, ...] | None]
"""From logical axes to mesh axes; what is not named is on every device."""

TENSOR_PARALLEL: Rules = {
    "vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "mlp": "tensor",
}  # fmt: skip


def check_rules(mesh: Mesh, rules: Rules) -> None:
    """Raise unless every rule is about axes that exist."""
    for logical, axes in rules.items():
        if logical not in LOGICAL_AXES:
            raise ArgumentError(
                "a sharding rule is about an axis that no parameter has",
                got=repr(logical),
                expected="one of " + ", ".join(LOGICAL_AXES),
                fix="rename the rule",
            )
        for axis in _listed(axes):
            if axis not in mesh.axis_names:
                raise ArgumentError(
                    f"the sharding rule of {logical!r} names an axis that the mesh lacks",
                    got=repr(axis),
                    expected="one of " + ", ".join(map(str, mesh.axis_names)),
                    fix="give the mesh such an axis, or change the rule",
                )


def sharding_of(
    parameter: str, names: Sequence[str], shape: Sequence[int], mesh: Mesh, rules: Rules
) -> NamedSharding:
    """How one parameter lies on the devices of a mesh.

    Args:
        parameter: its path, for messages.
        names: logical axes.
        shape: sizes of these.
        mesh: the devices.
        rules: which mesh axes a logical axis takes.

    Example:
        >>> import jax
        >>> from jax.sharding import Mesh
        >>> from xsake.model.sharding import sharding_of
        >>> mesh = Mesh(jax.devices()[:1], ("tensor",))
        >>> axes, rules = ("vocab", "embed"), {"vocab": "tensor"}
        >>> tuple(sharding_of("embedding", axes, (96, 48), mesh, rules).spec)
        ('tensor', None)
    """
    taken: list[str] = []
    for name, size in zip(names, shape, strict=True):
        axes = _listed(rules.get(name))
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ArgumentError(
                f"the axis {name!r} of {parameter} cannot be cut evenly",
                got=f"{size} over {parts} devices ({', '.join(axes)})",
                expected=f"a multiple of {parts}",
                fix=f"map {name!r} to None in the rules, or use fewer devices",
            )
        taken += axes
    if len(set(taken)) != len(taken):
        raise ArgumentError(
            f"two axes of {parameter} would take the same mesh axis",
            got=f"{tuple(names)} by the rules {dict(rules)}",
            expected="every mesh axis at most once in a parameter",
            fix="map one of the logical axes to None",
        )
    return NamedSharding(mesh, PartitionSpec(*(rules.get(name) for name in names)))


def _listed(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else axes
