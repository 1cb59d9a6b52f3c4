"""Distributed attention: mesh, sharding rules, head balancing, context parallelism."""

from xsake.distributed.context_parallel import ContextParallel
from xsake.distributed.head_balancing import HeadPlacement, place_heads, reorder_heads
from xsake.distributed.load_balancing import ContextWork, context_work
from xsake.distributed.mesh import AXES, BatchShare, MeshShape, batch_share, make_mesh
from xsake.distributed.sharding_rules import (
    DEFAULT_RULES,
    NamedShape,
    ShardingRules,
    batch_sharding,
    logical_sharding,
    tree_shardings,
)

__all__ = [
    "AXES", "DEFAULT_RULES", "BatchShare", "ContextParallel", "ContextWork", "HeadPlacement",
    "MeshShape", "NamedShape", "ShardingRules", "batch_share", "batch_sharding", "context_work",
    "logical_sharding", "make_mesh", "place_heads", "reorder_heads", "tree_shardings",
]  # fmt: skip
