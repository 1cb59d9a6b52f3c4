"""Ring attention inside a shard: chunks of keys go round, results are merged as they pass.

A shard never holds more than one foreign chunk, also while gradients are computed: the backward
ring computes the weights of a chunk again from the saved log of the whole softmax denominator, and
the gradients of a chunk travel with it until they are home.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xsake.attention.sharded import layout_of
from xsake.distributed.deal import block_of_stripe, stripe_of
from xsake.kernels import select
from xsake.kernels.block_sparse.op import BACKENDS, Choice, block_sparse, sink_lse
from xsake.kernels.block_sparse.problem import Cotangents, Gradients, Operands, Problem
from xsake.kernels.platforms import Refusal, by_platform
from xsake.layout import BlockLayout
from xsake.layout.grid import BlockGrid
from xsake.layout.ragged import Items, compact, used
from xsake.masks import AbstractMask


@dataclasses.dataclass(frozen=True)
class Ring:
    """What is known while tracing.

    Args:
        axis: the mesh axis that the ring goes along.
        shards: of that axis.
        problem: the numbers of the call.
        implementation: the one asked for, or None.
        grid: query blocks of this shard and kv blocks of one chunk.
        mask: rule inside partial blocks.
    """

    axis: str
    shards: int
    problem: Problem
    implementation: str | None
    grid: BlockGrid
    mask: AbstractMask | None


class Places(NamedTuple):
    """Lists of this shard's rows, and where tokens are; keys of the whole sequence, padded."""

    items: Items  # kv blocks of the whole sequence
    q_positions: Any  # [B or 1, own tokens] or None
    kv_positions: Any  # [B or 1, all tokens] or None
    q_segment_ids: Any  # [B, own tokens] or None
    kv_segment_ids: Any  # [B, all tokens] or None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, q, k, v, places: Places):
    """`(out, lse)` of this shard's queries against the keys of all shards.

    Args:
        ring: what is known while tracing.
        q: queries of this shard [B, own tokens, Hq, D].
        k, v: the chunk of keys and values that belongs here; chunk `c` has the kv blocks that are
            dealt to shard `c` to and fro.
        places: lists and positions.
    """
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    out = jnp.zeros((*q.shape[:3], v.shape[-1]), dtype)
    lse = jnp.full(q.shape[:3], -jnp.inf, dtype)

    def step(carry, turn):
        k, v, out, lse = carry
        operands = _operands(ring, q, k, v, places, turn)
        choice = select.choices(operands, ring.problem, ring.implementation)
        found, found_lse = block_sparse(operands, ring.problem, backend=choice)
        out, lse = merged(out, lse, found.astype(dtype), found_lse.astype(dtype))
        return (*_passed_on(ring, k, v), out, lse), None

    (_, _, out, lse), _ = jax.lax.scan(step, (k, v, out, lse), jnp.arange(ring.shards))
    return out.astype(q.dtype), lse


def _forward(ring: Ring, q, k, v, places: Places):
    out, lse = ring_attention(ring, q, k, v, places)
    return (out, lse), (q, k, v, places, out, lse)


def _backward(ring: Ring, saved, cotangents):
    q, k, v, places, out, lse = saved
    cotangents = Cotangents(*cotangents)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    zeros = [jnp.zeros(x.shape, dtype) for x in (q, k, v)]

    def step(carry, turn):
        k, v, d_q, d_k, d_v = carry
        operands = _operands(ring, q, k, v, places, turn)
        found = _gradients(ring, operands, out, lse, cotangents)
        d_q, d_k, d_v = (
            x + y.astype(dtype) for x, y in zip((d_q, d_k, d_v), found[:3], strict=True)
        )
        k, v, d_k, d_v = _passed_on(ring, k, v, d_k, d_v)
        return (k, v, d_q, d_k, d_v), None

    (_, _, *found), _ = jax.lax.scan(step, (k, v, *zeros), jnp.arange(ring.shards))
    return *(x.astype(y.dtype) for x, y in zip(found, (q, k, v), strict=True)), None


ring_attention.defvjp(_forward, _backward)


def merged(out, lse, other, other_lse):
    """Two results over different keys as one; differentiable, also where neither saw a key."""
    top = jnp.maximum(lse, other_lse)
    top = jax.lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    mass, other_mass = jnp.exp(lse - top), jnp.exp(other_lse - top)
    total = mass + other_mass
    empty = total == 0
    total = jnp.where(empty, 1, total)
    joint = out * (mass / total)[..., None] + other * (other_mass / total)[..., None]
    return joint, jnp.where(empty, -jnp.inf, top + jnp.log(total))


def with_sinks(out, lse, sinks):
    """Let the logits of sinks, [Hq, S], join a finished softmax: keys that carry no value."""
    sink = sink_lse(sinks.astype(lse.dtype))
    sink = jnp.broadcast_to(sink[None, None], lse.shape)
    joint, lse = merged(out.astype(lse.dtype), lse, jnp.zeros(out.shape, lse.dtype), sink)
    return joint.astype(out.dtype), lse


def _passed_on(ring: Ring, *arrays):
    """To the next shard; after as many steps as there are shards everything is home again."""
    pairs = [(shard, (shard + 1) % ring.shards) for shard in range(ring.shards)]
    return tuple(jax.lax.ppermute(x, ring.axis, pairs) for x in arrays)


def _operands(ring: Ring, q, k, v, places: Places, turn) -> Operands:
    """The call of this shard's queries against the chunk that is here in this turn."""
    chunk = (jax.lax.axis_index(ring.axis) - turn) % ring.shards
    grid = ring.grid
    blocks = block_of_stripe(jnp, chunk, jnp.arange(grid.kv_blocks), ring.shards)

    def of_chunk(x):
        if x is None:
            return None
        by_block = x.reshape(x.shape[0], -1, grid.block_kv)
        return by_block[:, blocks].reshape(x.shape[0], -1)

    kv_positions = of_chunk(places.kv_positions)
    if kv_positions is None and ring.mask is not None:
        offset = jnp.arange(grid.block_kv, dtype=jnp.int32)
        kv_positions = (blocks[:, None] * grid.block_kv + offset[None, :]).reshape(1, -1)
        kv_positions = kv_positions.astype(jnp.int32)
    return Operands(
        q, k, v,
        _chunk_layout(ring, places.items, chunk),
        q_positions=places.q_positions,
        kv_positions=kv_positions,
        q_segment_ids=places.q_segment_ids,
        kv_segment_ids=of_chunk(places.kv_segment_ids),
    )  # fmt: skip


def _chunk_layout(ring: Ring, items: Items, chunk) -> BlockLayout:
    """Of this shard's lists the blocks in one chunk, by their number inside it."""
    capacity = items.kv_block.shape[0]
    here = stripe_of(jnp, items.kv_block, ring.shards) == chunk
    keep = here & used(jnp, items.row_starts, capacity)
    inside = items.kv_block // ring.shards
    found = compact(jnp, keep, items.row_starts[:-1], None, inside, items.is_partial)
    return layout_of(Items(*found), ring.grid, ring.mask)


def _gradients(ring: Ring, operands: Operands, out, lse, cotangents: Cotangents) -> Gradients:
    """What one chunk adds to the gradients, given the results over all chunks."""

    def run(backend, operands, out, lse, cotangents):
        return backend.backward(operands, ring.problem, out, lse, cotangents)

    choice: Choice = select.choices(operands, ring.problem, ring.implementation)
    branches = {
        name: name if isinstance(name, Refusal) else functools.partial(run, BACKENDS[name])
        for _, name in choice
    }
    *named, (_, other) = choice
    table = {platform: branches[name] for platform, name in named}
    return by_platform(table, branches[other], operands, out, lse, cotangents)
