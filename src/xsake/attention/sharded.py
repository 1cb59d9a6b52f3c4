"""Attention on a mesh: batch and heads are sharded, tokens are not."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xsake.attention.runtime_pruning import prune_blocks
from xsake.errors import UnsupportedError
from xsake.kernels.block_sparse.api import OP, block_sparse
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.dispatch import Implementation
from xsake.kernels.sharding import Placing, explicit_axes, place
from xsake.layout import BlockLayout
from xsake.layout.csr import Items, gather_rows, is_concrete, namespace
from xsake.layout.grid import BlockGrid
from xsake.masks import AbstractMask

BATCH_AXES, HEAD_AXIS = ("data", "fsdp"), "tensor"


class MeshSplit(NamedTuple):
    """Mesh axes of batch and heads (None: not sharded) and their sizes."""

    batch_axes: tuple[str, ...] | None
    head_axis: str | tuple[str, ...] | None
    batch_parts: int
    head_parts: int


def attention_on_mesh(
    where: Mesh | Placing,
    inputs: BlockSparseInputs,
    config: BlockSparseConfig,
    implementation: Implementation,
    sinks: Array | None,
) -> Any:
    """Return `(o, lse)` of a call whose batch and heads are sharded.

    They are split over the axes "data", "fsdp" and "tensor" of a mesh, or as a `Placing` says,
    which is that of the arrays' types. A block list shared by all heads and batch elements is
    replicated. Otherwise it is split into one list of equal capacity per device.
    """
    if isinstance(where, Placing):
        batch = (where.batch,) if isinstance(where.batch, str) else where.batch
        mesh, split = where.mesh, MeshSplit(batch, where.heads, *where.parts)
        _check_mask_heads(inputs, split)
    else:
        mesh, split = where, split_over_mesh(where, inputs)
    layout = inputs.layout
    arrays = {**inputs._asdict(), "sinks": sinks}
    del arrays["layout"]
    arrays = {name: x for name, x in arrays.items() if x is not None}
    names = OP.names(implementation)
    OP.check(inputs, config, names)
    shared = is_shared(layout, split)
    lists = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    data = None if shared and layout.is_static else lists if shared else split_layout(layout, split)
    program = _ShardedProgram(
        mesh=mesh,
        split=split,
        problem=config,
        implementation=names,
        static=layout if data is None else None,
        grid=layout.grid,
        mask=layout.mask,
        parts=(1, 1) if shared else num_parts(layout, split),
        specs=tuple(partition_specs(arrays, split).items()),
        data_spec=PartitionSpec() if shared else PartitionSpec(split.batch_axes, split.head_axis),
    )
    return _run(program, arrays, data)


def map_over_mesh(
    mesh: Mesh | None, function: Callable, *arrays: Any, shared: tuple[Any, ...] = ()
) -> Any:
    """Apply `function` to each device's part of the batch and heads; to all without a mesh.

    Arrays and results are pytrees of [B, T, heads, ...]. The arrays `shared`, further arguments,
    are split along the batch only.
    """
    if mesh is None:
        return function(*arrays, *shared)
    shapes = [x.shape for x in jax.tree.leaves(arrays)]
    batch_axes, _ = _axes(mesh, BATCH_AXES, "batch", shapes[0][0])
    kv_heads = min(shape[2] for shape in shapes)
    head_axes, _ = _axes(mesh, (HEAD_AXIS,), "number of kv heads", kv_heads)
    spec = PartitionSpec(batch_axes, None, head_axes)
    specs = (spec,) * len(arrays) + (PartitionSpec(batch_axes),) * len(shared)
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)(
        *arrays, *shared
    )


@dataclasses.dataclass(frozen=True)
class _ShardedProgram:
    """Static arguments: the cache key of the compiled program."""

    mesh: Mesh | AbstractMesh  # abstract: from the types of the arrays
    split: MeshSplit
    problem: BlockSparseConfig
    implementation: tuple[str, ...] | None
    static: BlockLayout | None
    grid: BlockGrid
    mask: AbstractMask | None
    parts: tuple[int, int]
    specs: tuple[tuple[str, PartitionSpec], ...]
    data_spec: PartitionSpec

    def layout(self, data: Items | None) -> BlockLayout:
        """Return the layout of one device from its part of the lists."""
        if self.static is not None:
            return self.static
        assert data is not None, "a layout without data is static"
        batch_parts, head_parts = self.parts
        batch, heads = self.grid.batch // batch_parts, self.grid.heads // head_parts
        return build_layout(data, self.grid.replace(batch=batch, heads=heads), self.mask)


# Jitted so that calls outside jit compile once.
@functools.partial(jax.jit, static_argnums=0)
def _run(program: _ShardedProgram, arrays, data):
    """Run the program on every device."""

    def local(arrays, data):
        arrays = dict(arrays)
        sinks = arrays.pop("sinks", None)
        operands = prune_blocks(BlockSparseInputs(**arrays, layout=program.layout(data)))
        return block_sparse(
            operands, program.problem, implementation=program.implementation, sinks=sinks
        )

    out_spec = PartitionSpec(program.split.batch_axes, None, program.split.head_axis)
    mesh, specs = program.mesh, dict(program.specs)
    is_typed = isinstance(mesh, AbstractMesh)
    if is_typed:  # shard arrays that are not on the mesh yet
        arrays = {name: place(name, x, mesh, specs[name]) for name, x in arrays.items()}
        data = jax.tree.map(lambda x: place("the layout", x, mesh, program.data_spec), data)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, program.data_spec),
        out_specs=(out_spec, out_spec),
        axis_names=explicit_axes(mesh) if is_typed else frozenset(mesh.axis_names),
        check_vma=False,
    )(arrays, data)


def build_layout(data: Items, grid: BlockGrid, mask: AbstractMask | None) -> BlockLayout:
    """Build the layout whose lists are the last axis of `data`; other axes have size 1."""
    row_starts, kv_block, is_partial = (jnp.asarray(x.reshape(x.shape[-1])) for x in data)
    sizes = dataclasses.asdict(grid)
    return BlockLayout(row_starts, kv_block, is_partial, **sizes, mask=mask)


def split_over_mesh(mesh: Mesh, operands: BlockSparseInputs) -> MeshSplit:
    """Return the split of a call over the axes of a mesh; raise if it is uneven."""
    batch, _, kv_heads, _ = operands.k.shape
    batch_axes, batch_parts = _axes(mesh, BATCH_AXES, "batch", batch)
    head_axes, head_parts = _axes(mesh, (HEAD_AXIS,), "number of kv heads", kv_heads)
    head_axis = None if head_axes is None else HEAD_AXIS
    split = MeshSplit(batch_axes, head_axis, batch_parts, head_parts)
    _check_mask_heads(operands, split)
    return split


def _check_mask_heads(operands: BlockSparseInputs, split: MeshSplit) -> None:
    mask = operands.layout.mask
    if split.head_parts > 1 and mask is not None and mask.heads is not None:
        parts = f"{split.head_parts} devices of axis {split.head_axis!r}"
        raise UnsupportedError(
            "shard-per-head-mask",
            "a mask with per-head rules cannot be split over devices",
            got=f"{mask.heads} heads in {mask!r}, {parts}",
            expected="one rule for all heads; block lists may differ between heads",
            fix="use from_block_mask with per-head grids and one mask, or a mesh without that axis",
        )


def _axes(mesh: Mesh, axes: tuple[str, ...], what: str, size: int):
    """Return those of `axes` that the mesh has (None if none) and the product of their sizes."""
    present = tuple(axis for axis in axes if axis in mesh.shape)
    parts = math.prod(mesh.shape[axis] for axis in present)
    if size % parts:
        raise UnsupportedError(
            "shard-uneven",
            f"the {what} cannot be split evenly over the mesh",
            got=f"{size} over {parts} devices of axis {' and '.join(map(repr, present))}",
            expected=f"a multiple of {parts}",
            fix="use a mesh whose axes divide it, or no mesh",
        )
    return present or None, parts


def partition_specs(arrays: dict[str, Any], split: MeshSplit) -> dict[str, PartitionSpec]:
    """Return the PartitionSpec of each array; axes of size 1 are replicated."""
    specs = {}
    for name, x in arrays.items():
        batch, heads = split.batch_axes, split.head_axis
        if name in ("q", "k", "v"):
            specs[name] = PartitionSpec(batch, None, heads)
        elif name == "sinks":
            specs[name] = PartitionSpec(heads)
        else:  # bias [B, Hq, ...]; positions and segment ids [B, T]
            heads = heads if name == "bias" and x.shape[1] > 1 else None
            specs[name] = PartitionSpec(batch if x.shape[0] > 1 else None, heads)
    return specs


def is_shared(layout: BlockLayout, split: MeshSplit) -> bool:
    """Return whether all devices use the same list."""
    by_batch = layout.batch > 1 and split.batch_parts > 1
    return not by_batch and not (layout.heads > 1 and split.head_parts > 1)


def split_layout(layout: BlockLayout, split: MeshSplit) -> Items:
    """Return one list per device, arrays [batch parts, head parts, ...]."""
    parts = num_parts(layout, split)
    rows = np.arange(layout.rows).reshape(layout.batch, layout.heads, layout.q_blocks)
    items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    batches, heads = (np.split(np.arange(n), p) for n, p in zip(rows.shape, parts, strict=False))
    row_index = [rows[np.ix_(b, h)].reshape(-1) for b in batches for h in heads]
    capacity = layout.capacity
    if is_concrete(*items):
        lengths = np.diff(np.asarray(layout.row_starts))
        capacity = max(int(lengths[index].sum()) for index in row_index)
    xp = namespace(*items)
    lists = [gather_rows(xp, items, index, max(1, capacity)) for index in row_index]
    stacked = (jnp.asarray(xp.stack(x)).reshape(*parts, -1) for x in zip(*lists, strict=True))
    mesh_parts = (split.batch_parts, split.head_parts)
    return Items(*(jnp.broadcast_to(x, (*mesh_parts, x.shape[-1])) for x in stacked))


def num_parts(layout: BlockLayout, split: MeshSplit) -> tuple[int, int]:
    """Return the number of lists by batch and by head."""
    batch = split.batch_parts if layout.batch > 1 else 1
    return batch, split.head_parts if layout.heads > 1 else 1
