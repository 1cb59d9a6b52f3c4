"""Serialization of BlockLayout pytrees for `jax.export`."""

import json
from typing import Any

from jax import export

from xsake import masks
from xsake.errors import LayoutError
from xsake.layout.block_layout import BlockLayout
from xsake.layout.grid import BlockGrid
from xsake.layout.serialization import SIZES, describe_mask

NAME = "xsake.BlockLayout"


def _serialize(static: tuple[Any, ...]) -> bytes:
    """Encode sizes and mask of a layout; its arrays are inputs of the function."""
    *sizes, mask = static
    mask_dict = None if mask is None else describe_mask(mask)
    return json.dumps({"sizes": sizes, "mask": mask_dict}).encode()


def _deserialize(data: bytes) -> tuple[Any, ...]:
    try:
        document = json.loads(bytes(data))
        sizes, mask_dict = document["sizes"], document["mask"]
        grid = BlockGrid(**dict(zip(SIZES, sizes, strict=True)))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LayoutError(
            "invalid BlockLayout in an exported function",
            got=str(error)[:200],
            expected="data that jax.export wrote for xsake.BlockLayout",
        ) from error
    mask = None if mask_dict is None else masks.from_dict(mask_dict)
    return *(getattr(grid, name) for name in SIZES), mask


def register_for_export() -> None:
    """Register BlockLayout with `jax.export`; called once at import."""
    export.register_pytree_node_serialization(
        BlockLayout,
        serialized_name=NAME,
        serialize_auxdata=_serialize,
        deserialize_auxdata=_deserialize,
    )
