"""Runs an attention call on a mesh: batch and heads are split, tokens stay together."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from xsake.attention.arguments import Rules, Scores, complete
from xsake.attention.visibility import narrowed
from xsake.errors import UnsupportedError
from xsake.kernels import select
from xsake.kernels.block_sparse.op import block_sparse
from xsake.kernels.block_sparse.problem import Operands
from xsake.layout import BlockLayout
from xsake.layout.ragged import Items, gather_rows, is_concrete, namespace

BATCH_AXIS, HEAD_AXIS = "data", "tensor"


class Split(NamedTuple):
    """Mesh axes (None: not split) and how many parts they make."""

    batch_axis: str | None
    head_axis: str | None
    batch_parts: int
    head_parts: int


def attend_on_mesh(
    mesh: Mesh, q, k, v, rules: Rules, scores: Scores, implementation: str | None
):
    """`(out, lse)` with the batch split over the axis "data" and heads over "tensor".

    A list of blocks that all heads and batch elements share goes to every device as it is. One
    that differs between them is cut into one list per device; these are data of equal capacity.
    """
    operands, problem, sinks = complete(q, k, v, rules, scores)
    split = _split(mesh, operands)
    platform = mesh.devices.flat[0].platform
    backend = select.choose(operands, problem, platform, implementation)
    layout = operands.layout
    lists = None if _is_shared(layout, split) else _cut(layout, split)
    spread = operands._replace(layout=layout if lists is None and not layout.is_static else None)

    def local(operands, sinks, lists):
        own = operands.layout
        if lists is not None:
            own = _own_layout(layout, lists, split)
        elif own is None:
            own = layout
        operands = narrowed(operands._replace(layout=own))
        return block_sparse(operands, problem, backend=backend, sinks=sinks)

    batch, heads = split.batch_axis, split.head_axis
    whole = PartitionSpec(batch, None, heads)
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            _specs(spread, split),
            None if sinks is None else PartitionSpec(heads),
            None if lists is None else PartitionSpec(batch, heads),
        ),
        out_specs=(whole, whole),
        check_vma=False,
    )
    return jax.jit(run)(spread, sinks, lists)


def _split(mesh: Mesh, operands: Operands) -> Split:
    axes = [axis if axis in mesh.shape else None for axis in (BATCH_AXIS, HEAD_AXIS)]
    parts = [1 if axis is None else mesh.shape[axis] for axis in axes]
    batch, _, kv_heads, _ = operands.k.shape
    for what, size, axis, number in zip(("batch", "kv heads"), (batch, kv_heads), axes, parts):
        if size % number:
            raise UnsupportedError(
                f"the {what} cannot be split evenly over the mesh",
                got=f"{size} over {number} devices of axis {axis!r}",
                expected=f"a multiple of {number}",
                fix="use a mesh whose axis divides it, or no mesh",
            )
    mask = operands.layout.mask
    if parts[1] > 1 and mask is not None and mask.heads is not None:
        raise UnsupportedError(
            "a mask that differs between heads cannot be split over devices",
            got=f"{mask.heads} heads in {mask!r}, {parts[1]} devices of axis {HEAD_AXIS!r}",
            expected="one rule for all heads; the blocks listed may differ between heads",
            fix="use from_block_mask per head under one mask, or a mesh without that axis",
        )
    return Split(*axes, *parts)


def _specs(operands: Operands, split: Split) -> Operands:
    """How each array is spread; an axis of size 1 is repeated."""
    whole = PartitionSpec(split.batch_axis, None, split.head_axis)

    def rows(x):
        return None if x is None else PartitionSpec(split.batch_axis if x.shape[0] > 1 else None)

    bias = operands.bias
    if bias is not None:
        axes = zip(bias.shape[:2], (split.batch_axis, split.head_axis), strict=True)
        bias = PartitionSpec(*(axis if size > 1 else None for size, axis in axes))
    layout = None if operands.layout is None else PartitionSpec()
    return Operands(whole, whole, whole, layout, bias, *(rows(x) for x in operands[5:]))


def _is_shared(layout: BlockLayout, split: Split) -> bool:
    """Whether every device walks the same list."""
    by_batch = layout.batch > 1 and split.batch_parts > 1
    return not by_batch and not (layout.heads > 1 and split.head_parts > 1)


def _cut(layout: BlockLayout, split: Split) -> Items:
    """One list for each device, [batch parts, head parts, ...] each."""
    parts = _parts(layout, split)
    rows = np.arange(layout.rows).reshape(layout.batch, layout.heads, layout.q_blocks)
    items = Items(layout.row_starts, layout.kv_block, layout.is_partial)
    batches, heads = (np.split(np.arange(n), p) for n, p in zip(rows.shape, parts, strict=False))
    chosen = [rows[np.ix_(b, h)].reshape(-1) for b in batches for h in heads]
    capacity = layout.capacity
    if is_concrete(*items):
        lengths = np.diff(np.asarray(layout.row_starts))
        capacity = max(int(lengths[index].sum()) for index in chosen)
    xp = namespace(*items)
    cut = [gather_rows(xp, items, index, max(1, capacity)) for index in chosen]
    stacked = (jnp.asarray(xp.stack(x)).reshape(*parts, -1) for x in zip(*cut, strict=True))
    spread = (split.batch_parts, split.head_parts)
    return Items(*(jnp.broadcast_to(x, (*spread, x.shape[-1])) for x in stacked))


def _parts(layout: BlockLayout, split: Split) -> tuple[int, int]:
    """Into how many lists the layout is cut, by batch and by head."""
    return (
        split.batch_parts if layout.batch > 1 else 1,
        split.head_parts if layout.heads > 1 else 1,
    )


def _own_layout(layout: BlockLayout, lists: Items, split: Split) -> BlockLayout:
    """The layout of one device, from its slice [1, 1, ...] of the lists."""
    batch_parts, head_parts = _parts(layout, split)
    return BlockLayout(
        *(x.reshape(math.prod(x.shape)) for x in lists),
        layout.q_tokens,
        layout.kv_tokens,
        layout.block_q,
        layout.block_kv,
        layout.batch // batch_parts,
        layout.heads // head_parts,
        layout.mask,
    )
