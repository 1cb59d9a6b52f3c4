"""Splitting work over devices: the mesh, sharding rules, balanced heads, context parallelism."""

from xsake.distributed.balance import Placement, place_heads, reordered
from xsake.distributed.context import ContextParallel
from xsake.distributed.deal import ContextWork, context_work
from xsake.distributed.mesh import AXES, BatchShare, MeshShape, batch_share, make_mesh
from xsake.distributed.rules import (
    DEFAULT_RULES,
    NamedShape,
    Rules,
    batch_sharding,
    named_shapes,
    sharding_of,
    shardings_by_path,
    shardings_of,
)

__all__ = [
    "AXES",
    "DEFAULT_RULES",
    "BatchShare",
    "ContextParallel",
    "ContextWork",
    "MeshShape",
    "NamedShape",
    "Placement",
    "Rules",
    "batch_share",
    "batch_sharding",
    "context_work",
    "make_mesh",
    "named_shapes",
    "place_heads",
    "reordered",
    "sharding_of",
    "shardings_by_path",
    "shardings_of",
]
