"""Lets `jax.export` write functions that take or return block layouts."""

import json
from typing import Any

from jax import export

from xsake import masks
from xsake.errors import LayoutError
from xsake.layout.block_layout import BlockLayout
from xsake.layout.grid import BlockGrid
from xsake.layout.json_form import SIZES, describe_mask

NAME = "xsake.BlockLayout"


def _serialize(static: tuple[Any, ...]) -> bytes:
    """Sizes and mask of a layout; its arrays are the function's own inputs."""
    *sizes, mask = static
    described = None if mask is None else describe_mask(mask)
    return json.dumps({"sizes": sizes, "mask": described}).encode()


def _deserialize(data: bytes) -> tuple[Any, ...]:
    try:
        document = json.loads(bytes(data))
        sizes, described = document["sizes"], document["mask"]
        grid = BlockGrid(**dict(zip(SIZES, sizes, strict=True)))
    except (ValueError, KeyError, TypeError, RecursionError) as broken:
        raise LayoutError(
            "the exported function describes no layout",
            got=str(broken)[:200],
            expected="what jax.export wrote for xsake.BlockLayout",
        ) from broken
    mask = None if described is None else masks.from_dict(described)
    return *(getattr(grid, name) for name in SIZES), mask


def register_for_export() -> None:
    """Register the layout type with `jax.export`; once, when the package is imported."""
    export.register_pytree_node_serialization(
        BlockLayout,
        serialized_name=NAME,
        serialize_auxdata=_serialize,
        deserialize_auxdata=_deserialize,
    )
