"""Which mesh axes each logical axis of an array takes: rules, checked by name, nothing guessed.

Arrays are known here by path, logical names and shape. `shardings_of` finds the names in the
metadata that flax leaves on variables, without knowing flax.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xsake import placement
from xsake.distributed.mesh import BATCH_AXES
from xsake.errors import ArgumentError
from xsake.placement import Rules

DEFAULT_RULES: Rules = MappingProxyType(
    {
        "batch": BATCH_AXES,
        "tokens": "context",
        "embed": "fsdp",
        "vocab": "tensor",
        "q_heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "head_dim": None,
        "layer": None,
        "position": None,
        "branch": None,
        "run": None,
        "summary": None,
    }
)
"""Parameters are cut by `fsdp` and `tensor`, batches by `data` and `fsdp`, tokens by `context`.

Every name needs a rule: None has it on every device.
"""


class NamedShape(NamedTuple):
    """An array as the rules see it: where it is, what its axes are called, and their sizes."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]


def sharding_of(array: NamedShape, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> NamedSharding:
    """How one array lies on the devices of a mesh.

    An axis that cannot be cut evenly is an error and never kept whole in silence: map it to None in
    the rules to have it on every device.

    Args:
        array: its path (for messages), logical axes and sizes.
        mesh: the devices.
        rules: which mesh axes a logical axis takes.

    Example:
        >>> import jax
        >>> from xsake.distributed import MeshShape, NamedShape, make_mesh, sharding_of
        >>> mesh = make_mesh(MeshShape(), jax.devices()[:1])
        >>> tuple(sharding_of(NamedShape("up", ("embed", "mlp"), (48, 64)), mesh).spec)
        ('fsdp', 'tensor')
    """
    if len(array.names) != len(array.shape):
        raise ArgumentError(
            f"{array.path} has another number of axes than of names",
            got=f"shape {array.shape}, names {array.names}",
            expected="a name for each axis",
        )
    for name in array.names:
        if name not in rules:
            raise ArgumentError(
                f"no rule for the axis {name!r} of {array.path}",
                got="rules for " + ", ".join(rules),
                expected=f"a rule for {name!r}",
                fix=f"add {name!r}: None to have it on every device",
            )
        placement.require_mesh_axes(name, rules, mesh)
    return placement.sharding_of(*array, mesh, rules)


def shardings_by_path(
    arrays: Iterable[NamedShape], mesh: Mesh, rules: Rules = DEFAULT_RULES
) -> dict[str, NamedSharding]:
    """How each of some arrays lies on a mesh, by its path.

    Args:
        arrays: their paths, logical axes and sizes, from `named_shapes` say.
        mesh: the devices.
        rules: which mesh axes a logical axis takes.
    """
    return {array.path: sharding_of(array, mesh, rules) for array in arrays}


def named_shapes(tree: Any) -> list[NamedShape]:
    """Path, names and shape of every variable in a tree that says how its axes are called.

    Args:
        tree: of flax variables, real or abstract: a model's state, an optimizer's, or both.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_names_axes)
    return [_named(path, leaf) for path, leaf in leaves if _names_axes(leaf)]


def shardings_of(
    tree: Any,
    mesh: Mesh,
    rules: Rules = DEFAULT_RULES,
    *,
    unnamed: PartitionSpec | None = None,
) -> Any:
    """The shardings of a whole state, as `jax.jit` and `jax.device_put` take them.

    A variable lies as the names of its axes say, and so does what an optimizer keeps for it.
    Numbers without axes are on every device.

    Args:
        tree: of flax variables and arrays, real or abstract: parameters, or a whole train state.
        mesh: the devices.
        rules: which mesh axes a logical axis takes.
        unnamed: how arrays lie that have axes but no names; None refuses them.

    Returns:
        A tree that is a prefix of `tree`: a `NamedSharding` in the place of each variable or array.
    """

    def find(path, leaf) -> NamedSharding:
        if _names_axes(leaf):
            return sharding_of(_named(path, leaf), mesh, rules)
        shape = tuple(getattr(leaf, "shape", ()))
        if shape and unnamed is None:
            raise ArgumentError(
                f"{_text(path)} has axes without names",
                got=f"shape {shape}",
                expected="logical names in the variable's metadata, or no axes",
                fix="pass unnamed=PartitionSpec() to have such arrays on every device",
            )
        return NamedSharding(mesh, unnamed if shape and unnamed is not None else PartitionSpec())

    return jax.tree_util.tree_map_with_path(find, tree, is_leaf=_names_axes)


def batch_sharding(
    mesh: Mesh, names: tuple[str, ...] = ("batch",), rules: Rules = DEFAULT_RULES
) -> NamedSharding:
    """How batches lie on a mesh: rows over `data` and `fsdp`, by default, and the rest whole.

    Batches of tokens hold one more token than the model reads, so their sequences are cut later,
    when they are activations: these have the names ("batch", "tokens").

    Args:
        mesh: the devices.
        names: logical axes, leading ones first.
        rules: which mesh axes a logical axis takes.

    Example:
        >>> import jax
        >>> from xsake.distributed import MeshShape, batch_sharding, make_mesh
        >>> mesh = make_mesh(MeshShape(), jax.devices()[:1])
        >>> tuple(batch_sharding(mesh).spec)
        (('data', 'fsdp'),)
    """
    return sharding_of(NamedShape("the batch", names, (0,) * len(names)), mesh, rules)


def _names_axes(leaf: Any) -> bool:
    """Whether a leaf is a flax variable, which carries names, or at least could."""
    return hasattr(leaf, "get_metadata")


def _named(path: tuple, variable: Any) -> NamedShape:
    """A variable as rules see it; flax keeps the names in the metadata `out_sharding`."""
    shape = tuple(getattr(variable, "shape", ()))
    names = variable.get_metadata().get("out_sharding")
    if names is None:
        names = ()
        if shape:
            raise ArgumentError(
                f"{_text(path)} is a variable whose axes have no names",
                got=f"shape {shape}",
                expected='metadata such as out_sharding=("embed", "mlp")',
                fix="name its axes where it is made",
            )
    return NamedShape(_text(path), tuple(names), shape)


def _text(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
