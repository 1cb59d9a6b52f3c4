"""Runs an attention call on a mesh: batch and heads are split, tokens stay together."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from xsake.attention.arguments import Rules, Scores, complete
from xsake.attention.visibility import narrowed
from xsake.errors import UnsupportedError
from xsake.kernels import select
from xsake.kernels.block_sparse.op import Choice, block_sparse
from xsake.kernels.block_sparse.problem import Operands, Problem
from xsake.kernels.placed import Placing, explicit_axes, place
from xsake.layout import BlockLayout
from xsake.layout.grid import BlockGrid
from xsake.layout.ragged import Items, gather_rows, is_concrete, namespace
from xsake.masks import AbstractMask

BATCH_AXES, HEAD_AXIS = ("data", "fsdp"), "tensor"


class Split(NamedTuple):
    """Mesh axes (None: not split) and how many parts they make."""

    batch_axes: tuple[str, ...] | None
    head_axis: str | tuple[str, ...] | None
    batch_parts: int
    head_parts: int


def attend_on_mesh(mesh: Mesh, q, k, v, rules: Rules, scores: Scores, implementation: str | None):
    """`(out, lse)` with the batch split over the axes "data" and "fsdp", heads over "tensor".

    A list of blocks that all heads and batch elements share goes to every device as it is. One
    that differs between them is cut into one list per device; these are data of equal capacity.
    """
    operands, problem, sinks = complete(q, k, v, rules, scores)
    backend = select.choices(operands, problem, implementation)
    return _attend_split(mesh, split_of(mesh, operands), operands, problem, backend, sinks)


def attend_in_place(
    placing: Placing, operands: Operands, problem: Problem, backend: Choice, sinks
) -> Any:
    """`(out, lse)` of arrays whose types say how batch and heads are split over a mesh."""
    batch = (placing.batch,) if isinstance(placing.batch, str) else placing.batch
    split = Split(batch, placing.heads, *placing.parts)
    _check_rule(operands, split)
    return _attend_split(placing.mesh, split, operands, problem, backend, sinks)


def _attend_split(
    mesh: Mesh | AbstractMesh,
    split: Split,
    operands: Operands,
    problem: Problem,
    backend: Choice,
    sinks,
) -> Any:
    layout = operands.layout
    arrays = {**operands._asdict(), "sinks": sinks}
    del arrays["layout"]
    arrays = {name: x for name, x in arrays.items() if x is not None}
    shared = is_shared(layout, split)
    lists = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    data = None if shared and layout.is_static else lists if shared else cut(layout, split)
    program = _Program(
        mesh=mesh,
        split=split,
        problem=problem,
        backend=backend,
        static=layout if data is None else None,
        grid=layout.grid,
        mask=layout.mask,
        cut=(1, 1) if shared else parts_of(layout, split),
        specs=tuple(specs_of(arrays, split).items()),
        data_spec=PartitionSpec() if shared else PartitionSpec(split.batch_axes, split.head_axis),
    )
    return _run(program, arrays, data)


def each_part(mesh: Mesh | None, function: Callable, *arrays: Any) -> Any:
    """`function(*arrays)`, by every device for its part of the batch and of the heads.

    Args:
        mesh: None: one device does it all.
        function: of arrays [B, T, heads, ...] and trees of them, to such arrays.
        arrays: of the whole call; an absent one is None.
    """
    if mesh is None:
        return function(*arrays)
    shapes = [x.shape for x in jax.tree.leaves(arrays)]
    batch_axes, _ = _axes(mesh, BATCH_AXES, "batch", shapes[0][0])
    kv_heads = min(shape[2] for shape in shapes)
    head_axes, _ = _axes(mesh, (HEAD_AXIS,), "number of kv heads", kv_heads)
    spec = PartitionSpec(batch_axes, None, head_axes)
    return jax.shard_map(
        function, mesh=mesh, in_specs=(spec,) * len(arrays), out_specs=spec, check_vma=False
    )(*arrays)


@dataclasses.dataclass(frozen=True)
class _Program:
    """The arguments that are known while tracing: the key of the compiled program."""

    mesh: Mesh | AbstractMesh  # abstract: of the types of the arrays
    split: Split
    problem: Problem
    backend: Choice
    static: BlockLayout | None
    grid: BlockGrid
    mask: AbstractMask | None
    cut: tuple[int, int]
    specs: tuple[tuple[str, PartitionSpec], ...]
    data_spec: PartitionSpec

    def layout(self, data: Items | None) -> BlockLayout:
        """The layout of one device, from its part of the lists."""
        if self.static is not None:
            return self.static
        assert data is not None, "only a static layout is not data"
        batch_parts, head_parts = self.cut
        batch, heads = self.grid.batch // batch_parts, self.grid.heads // head_parts
        return layout_of(data, self.grid.replace(batch=batch, heads=heads), self.mask)


# Jitted here so that calls outside `jit` compile once and not at every call.
@functools.partial(jax.jit, static_argnums=0)
def _run(program: _Program, arrays, data):
    """Run the program on every device."""

    def local(arrays, data):
        arrays = dict(arrays)
        sinks = arrays.pop("sinks", None)
        operands = narrowed(Operands(**arrays, layout=program.layout(data)))
        return block_sparse(operands, program.problem, backend=program.backend, sinks=sinks)

    whole = PartitionSpec(program.split.batch_axes, None, program.split.head_axis)
    mesh, specs = program.mesh, dict(program.specs)
    is_typed = isinstance(mesh, AbstractMesh)
    if is_typed:  # arrays that are not spread over the mesh yet are spread first
        arrays = {name: place(name, x, mesh, specs[name]) for name, x in arrays.items()}
        data = jax.tree.map(lambda x: place("the layout", x, mesh, program.data_spec), data)
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, program.data_spec),
        out_specs=(whole, whole),
        axis_names=explicit_axes(mesh) if is_typed else frozenset(mesh.axis_names),
        check_vma=False,
    )(arrays, data)


def layout_of(data: Items, grid: BlockGrid, mask: AbstractMask | None) -> BlockLayout:
    """The layout whose lists are the last axis of `data`; further axes have size 1."""
    row_starts, kv_block, is_partial = (jnp.asarray(x.reshape(x.shape[-1])) for x in data)
    sizes = dataclasses.asdict(grid)
    return BlockLayout(row_starts, kv_block, is_partial, **sizes, mask=mask)


def split_of(mesh: Mesh, operands: Operands) -> Split:
    """How a call is split over the axes that a mesh has; an error if it cannot be done evenly."""
    batch, _, kv_heads, _ = operands.k.shape
    batch_axes, batch_parts = _axes(mesh, BATCH_AXES, "batch", batch)
    head_axes, head_parts = _axes(mesh, (HEAD_AXIS,), "number of kv heads", kv_heads)
    head_axis = None if head_axes is None else HEAD_AXIS
    split = Split(batch_axes, head_axis, batch_parts, head_parts)
    _check_rule(operands, split)
    return split


def _check_rule(operands: Operands, split: Split) -> None:
    mask = operands.layout.mask
    if split.head_parts > 1 and mask is not None and mask.heads is not None:
        parts = f"{split.head_parts} devices of axis {split.head_axis!r}"
        raise UnsupportedError(
            "a mask that differs between heads cannot be split over devices",
            got=f"{mask.heads} heads in {mask!r}, {parts}",
            expected="one rule for all heads; the blocks listed may differ between heads",
            fix="use from_block_mask per head under one mask, or a mesh without that axis",
        )


def _axes(mesh: Mesh, axes: tuple[str, ...], what: str, size: int):
    """Those of the axes that the mesh has, None if none, and how many parts they make of `size`."""
    found = tuple(axis for axis in axes if axis in mesh.shape)
    parts = math.prod(mesh.shape[axis] for axis in found)
    if size % parts:
        raise UnsupportedError(
            f"the {what} cannot be split evenly over the mesh",
            got=f"{size} over {parts} devices of axis {' and '.join(map(repr, found))}",
            expected=f"a multiple of {parts}",
            fix="use a mesh whose axes divide it, or no mesh",
        )
    return found or None, parts


def specs_of(arrays: dict[str, Any], split: Split) -> dict[str, PartitionSpec]:
    """How each array is spread; an axis of size 1 is repeated."""
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


def is_shared(layout: BlockLayout, split: Split) -> bool:
    """Whether every device walks the same list."""
    by_batch = layout.batch > 1 and split.batch_parts > 1
    return not by_batch and not (layout.heads > 1 and split.head_parts > 1)


def cut(layout: BlockLayout, split: Split) -> Items:
    """One list for each device, [batch parts, head parts, ...] each."""
    parts = parts_of(layout, split)
    rows = np.arange(layout.rows).reshape(layout.batch, layout.heads, layout.q_blocks)
    items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    batches, heads = (np.split(np.arange(n), p) for n, p in zip(rows.shape, parts, strict=False))
    chosen = [rows[np.ix_(b, h)].reshape(-1) for b in batches for h in heads]
    capacity = layout.capacity
    if is_concrete(*items):
        lengths = np.diff(np.asarray(layout.row_starts))
        capacity = max(int(lengths[index].sum()) for index in chosen)
    xp = namespace(*items)
    lists = [gather_rows(xp, items, index, max(1, capacity)) for index in chosen]
    stacked = (jnp.asarray(xp.stack(x)).reshape(*parts, -1) for x in zip(*lists, strict=True))
    spread = (split.batch_parts, split.head_parts)
    return Items(*(jnp.broadcast_to(x, (*spread, x.shape[-1])) for x in stacked))


def parts_of(layout: BlockLayout, split: Split) -> tuple[int, int]:
    """Into how many lists the layout is cut, by batch and by head."""
    return (
        split.batch_parts if layout.batch > 1 else 1,
        split.head_parts if layout.heads > 1 else 1,
    )
