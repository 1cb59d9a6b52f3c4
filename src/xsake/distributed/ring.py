"""Ring attention inside shard_map: K/V chunks rotate, partial softmax results are merged.

A shard holds at most one remote chunk, also in the backward pass, which recomputes the
probabilities of a chunk from the saved lse; dK and dV of a chunk rotate with it.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.attention.sharded import build_layout
from xsake.distributed.load_balancing import zigzag_block, zigzag_shard
from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.api import block_sparse, block_sparse_backward
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.dispatch import Implementation
from xsake.layout import BlockLayout
from xsake.layout.csr import Items, compact
from xsake.layout.grid import BlockGrid
from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True)
class Ring:
    """Static arguments of ring attention."""

    axis: str  # mesh axis of the ring
    shards: int  # size of that axis
    problem: BlockSparseConfig  # scale and softcap
    implementation: Implementation  # requested implementation, or None
    grid: BlockGrid  # query blocks of this shard and kv blocks of one chunk
    mask: AbstractMask | None  # element mask of partial blocks


class RingInputs(NamedTuple):
    """Block lists, positions and segment ids; those of keys cover the whole padded sequence."""

    items: Items  # kv blocks of the whole sequence
    q_positions: Any  # [B or 1, shard tokens] or None
    kv_positions: Any  # [B or 1, all tokens] or None
    q_segment_ids: Any  # [B, shard tokens] or None
    kv_segment_ids: Any  # [B, all tokens] or None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, q, k, v, inputs: RingInputs):
    """Return `(out, lse)` of this shard's queries over the keys of all shards.

    Args:
        ring: static arguments.
        q: queries of this shard [B, shard tokens, Hq, D].
        k, v: local chunk; chunk `c` has the kv blocks of shard `c` in zigzag order.
        inputs: block lists, positions and segment ids.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    out = jnp.zeros((*q.shape[:3], v.shape[-1]), dtype)
    lse = jnp.full(q.shape[:3], -jnp.inf, dtype)

    def step(carry, step_index):
        k, v, out, lse = carry
        operands = _operands(ring, q, k, v, inputs, step_index)
        chunk = block_sparse(operands, ring.problem, implementation=ring.implementation)
        out, lse = online_softmax.merge(out, lse, *(x.astype(dtype) for x in chunk))
        return (*_rotate(ring, k, v), out, lse), None

    (_, _, out, lse), _ = jax.lax.scan(step, (k, v, out, lse), jnp.arange(ring.shards))
    return out.astype(q.dtype), lse


def _forward(ring: Ring, q, k, v, inputs: RingInputs):
    out, lse = ring_attention(ring, q, k, v, inputs)
    return (out, lse), (q, k, v, inputs, out, lse)


def _backward(ring: Ring, residuals, cotangents):
    q, k, v, inputs, out, lse = residuals
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    zeros = [jnp.zeros(x.shape, dtype) for x in (q, k, v)]

    def step(carry, step_index):
        k, v, dq, dk, dv = carry
        operands = _operands(ring, q, k, v, inputs, step_index)
        grads = block_sparse_backward(
            operands, ring.problem, out, lse, *cotangents, implementation=ring.implementation
        )
        dq, dk, dv = (x + y.astype(dtype) for x, y in zip((dq, dk, dv), grads[:3], strict=True))
        k, v, dk, dv = _rotate(ring, k, v, dk, dv)
        return (k, v, dq, dk, dv), None

    (_, _, *grads), _ = jax.lax.scan(step, (k, v, *zeros), jnp.arange(ring.shards))
    return *(x.astype(y.dtype) for x, y in zip(grads, (q, k, v), strict=True)), None


ring_attention.defvjp(_forward, _backward)


def _rotate(ring: Ring, *arrays):
    """Send arrays to the next shard."""
    pairs = [(shard, (shard + 1) % ring.shards) for shard in range(ring.shards)]
    return tuple(jax.lax.ppermute(x, ring.axis, pairs) for x in arrays)


def _operands(ring: Ring, q, k, v, inputs: RingInputs, step_index) -> BlockSparseInputs:
    """Return the operands of this shard's queries and the chunk of this step."""
    chunk = (jax.lax.axis_index(ring.axis) - step_index) % ring.shards
    grid = ring.grid
    blocks = zigzag_block(jnp, chunk, jnp.arange(grid.kv_blocks), ring.shards)

    def select_chunk(x):
        if x is None:
            return None
        by_block = x.reshape(x.shape[0], -1, grid.block_kv)
        return by_block[:, blocks].reshape(x.shape[0], -1)

    kv_positions = select_chunk(inputs.kv_positions)
    if kv_positions is None and ring.mask is not None:
        offset = jnp.arange(grid.block_kv, dtype=jnp.int32)
        kv_positions = (blocks[:, None] * grid.block_kv + offset[None, :]).reshape(1, -1)
        kv_positions = kv_positions.astype(jnp.int32)
    return BlockSparseInputs(
        q, k, v,
        _chunk_layout(ring, inputs.items, chunk),
        q_positions=inputs.q_positions,
        kv_positions=kv_positions,
        q_segment_ids=inputs.q_segment_ids,
        kv_segment_ids=select_chunk(inputs.kv_segment_ids)
    )  # fmt: skip


def _chunk_layout(ring: Ring, items: Items, chunk) -> BlockLayout:
    """Return the layout of the listed blocks of one chunk, with indices relative to the chunk."""
    capacity = items.kv_block.shape[0]
    in_chunk = zigzag_shard(jnp, items.kv_block, ring.shards) == chunk
    keep = in_chunk & (jnp.arange(capacity) < items.row_starts[-1])
    chunk_index = items.kv_block // ring.shards
    chunk_items = compact(jnp, keep, items.row_starts[:-1], None, chunk_index, items.is_partial)
    return build_layout(Items(*chunk_items), ring.grid, ring.mask)
