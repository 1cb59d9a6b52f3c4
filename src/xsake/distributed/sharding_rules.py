"""Logical axis rules: shardings of named arrays and of flax variables.

`tree_shardings` reads axis names from the metadata of flax variables without importing flax.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from xsake import sharding
from xsake.distributed.mesh import BATCH_AXES
from xsake.errors import ArgumentError
from xsake.sharding import ShardingRules

DEFAULT_RULES: ShardingRules = MappingProxyType(
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
"""Parameters are sharded by `fsdp` and `tensor`, batches by `data` and `fsdp`, tokens by `context`.

Every name needs a rule; None means replicated.
"""


class NamedShape(NamedTuple):
    """Path, logical axis names and shape of an array."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]


def logical_sharding(
    array: NamedShape, mesh: Mesh, rules: ShardingRules = DEFAULT_RULES
) -> NamedSharding:
    """Return the NamedSharding of an array.

    An axis that cannot be sharded evenly raises; map it to None in the rules to replicate it.

    Args:
        array: path (for errors), axis names and shape.
        mesh: device mesh.
        rules: mesh axes by logical axis.

    Example:
        >>> import jax
        >>> from xsake.distributed import MeshShape, NamedShape, logical_sharding, make_mesh
        >>> mesh = make_mesh(MeshShape(), jax.devices()[:1])
        >>> tuple(logical_sharding(NamedShape("up", ("embed", "mlp"), (48, 64)), mesh).spec)
        ('fsdp', 'tensor')
    """
    if len(array.names) != len(array.shape):
        raise ArgumentError(
            "rule-axes", f"{array.path} has a different number of axes and names",
            got=f"shape {array.shape}, names {array.names}", expected="one name per axis",
        )  # fmt: skip
    for name in array.names:
        if name not in rules:
            raise ArgumentError(
                "rule-missing", f"no rule for the axis {name!r} of {array.path}",
                got="rules for " + ", ".join(rules), expected=f"a rule for {name!r}",
                fix=f"add {name!r}: None to replicate it",
            )  # fmt: skip
        sharding.check_mesh_axes(name, rules, mesh)
    return sharding.named_sharding(*array, mesh, rules)


def shardings_by_path(
    arrays: Iterable[NamedShape], mesh: Mesh, rules: ShardingRules = DEFAULT_RULES
) -> dict[str, NamedSharding]:
    """Return the shardings of arrays by path.

    Args:
        arrays: paths, axis names and shapes, e.g. from `named_shapes`.
        mesh: device mesh.
        rules: mesh axes by logical axis.
    """
    return {array.path: logical_sharding(array, mesh, rules) for array in arrays}


def named_shapes(tree: Any) -> list[NamedShape]:
    """Return path, axis names and shape of every flax variable in a tree.

    Args:
        tree: flax variables, concrete or abstract.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_variable)
    return [_named_shape(path, leaf) for path, leaf in leaves if _is_variable(leaf)]


def tree_shardings(
    tree: Any,
    mesh: Mesh,
    rules: ShardingRules = DEFAULT_RULES,
    *,
    unnamed: PartitionSpec | None = None,
) -> Any:
    """Return the shardings of a pytree, for `jax.jit` and `jax.device_put`.

    Variables and their optimizer states are sharded by axis names; scalars are replicated.

    Args:
        tree: flax variables and arrays, concrete or abstract, e.g. a train state.
        mesh: device mesh.
        rules: mesh axes by logical axis.
        unnamed: spec of arrays with axes but without names; None raises.

    Returns:
        A prefix of `tree` with a `NamedSharding` per variable or array.
    """

    def to_sharding(path, leaf) -> NamedSharding:
        if _is_variable(leaf):
            return logical_sharding(_named_shape(path, leaf), mesh, rules)
        shape = tuple(getattr(leaf, "shape", ()))
        if shape and unnamed is None:
            raise ArgumentError(
                "axes-unnamed", f"{_path_string(path)} has axes without names",
                got=f"shape {shape}",
                expected="logical names in the variable's metadata, or no axes",
                fix="pass unnamed=PartitionSpec() to replicate such arrays",
            )  # fmt: skip
        return NamedSharding(mesh, unnamed if shape and unnamed is not None else PartitionSpec())

    return jax.tree_util.tree_map_with_path(to_sharding, tree, is_leaf=_is_variable)


def batch_sharding(
    mesh: Mesh, names: tuple[str, ...] = ("batch",), rules: ShardingRules = DEFAULT_RULES
) -> NamedSharding:
    """Return the sharding of batches: by default rows over `data` and `fsdp`.

    Token batches have one more token than the model reads, so sequences are sharded later, as
    activations with the names ("batch", "tokens").

    Args:
        mesh: device mesh.
        names: leading logical axes.
        rules: mesh axes by logical axis.

    Example:
        >>> import jax
        >>> from xsake.distributed import MeshShape, batch_sharding, make_mesh
        >>> mesh = make_mesh(MeshShape(), jax.devices()[:1])
        >>> tuple(batch_sharding(mesh).spec)
        (('data', 'fsdp'),)
    """
    return logical_sharding(NamedShape("the batch", names, (0,) * len(names)), mesh, rules)


def _is_variable(leaf: Any) -> bool:
    """Return whether a leaf is a flax variable."""
    return hasattr(leaf, "get_metadata")


def _named_shape(path: tuple, variable: Any) -> NamedShape:
    """Return the named shape of a variable; flax stores names in the metadata `out_sharding`."""
    shape = tuple(getattr(variable, "shape", ()))
    names = variable.get_metadata().get("out_sharding")
    if names is None:
        names = ()
        if shape:
            raise ArgumentError(
                "variable-axes-unnamed",
                f"{_path_string(path)} is a variable whose axes have no names",
                got=f"shape {shape}", expected='metadata such as out_sharding=("embed", "mlp")',
                fix="name its axes where it is created",
            )  # fmt: skip
    return NamedShape(_path_string(path), tuple(names), shape)


def _path_string(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
