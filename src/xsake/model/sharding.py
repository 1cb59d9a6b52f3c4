"""Logical axes of parameters and sharding rules for them."""

from jax.sharding import Mesh

from xsake.errors import ArgumentError
from xsake.sharding import ShardingRules, check_mesh_axes

LOGICAL_AXES = (
    "layer", "vocab", "position", "embed", "q_heads", "kv_heads", "head_dim", "mlp",
    "branch", "index_heads", "run", "summary",
)  # fmt: skip

TENSOR_PARALLEL: ShardingRules = {
    "vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "mlp": "tensor",
}  # fmt: skip


def default_rules(mesh: Mesh) -> ShardingRules:
    """Return the rules of tensor parallelism whose axis the mesh has."""
    return {name: axis for name, axis in TENSOR_PARALLEL.items() if axis in mesh.axis_names}


def check_rules(mesh: Mesh, rules: ShardingRules) -> None:
    """Raise ArgumentError if a rule has an unknown logical or mesh axis."""
    for logical in rules:
        if logical not in LOGICAL_AXES:
            raise ArgumentError(
                "rule-axis-name", "a sharding rule has an unknown logical axis", got=repr(logical),
                expected="one of " + ", ".join(LOGICAL_AXES), fix="rename the rule",
            )  # fmt: skip
        check_mesh_axes(logical, rules, mesh)
