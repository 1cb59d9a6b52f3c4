"""The logical axes of parameters, and rules for them: what a loader puts where on a mesh."""

from jax.sharding import Mesh

from xsake.errors import ArgumentError
from xsake.placement import Rules, require_mesh_axes

LOGICAL_AXES = (
    "layer", "vocab", "position", "embed", "q_heads", "kv_heads", "head_dim", "mlp",
    "branch", "run", "summary",
)  # fmt: skip

TENSOR_PARALLEL: Rules = {
    "vocab": "tensor", "q_heads": "tensor", "kv_heads": "tensor", "mlp": "tensor",
}  # fmt: skip


def check_rules(mesh: Mesh, rules: Rules) -> None:
    """Raise unless every rule is about axes that exist."""
    for logical in rules:
        if logical not in LOGICAL_AXES:
            raise ArgumentError(
                "a sharding rule is about an axis that no parameter has",
                got=repr(logical),
                expected="one of " + ", ".join(LOGICAL_AXES),
                fix="rename the rule",
            )
        require_mesh_axes(logical, rules, mesh)
