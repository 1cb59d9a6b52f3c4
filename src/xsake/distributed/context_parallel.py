"""Context parallelism: attention with the sequence sharded over devices and balanced work.

In a ring, K/V chunks rotate and partial softmax results are merged. A shard holds at most one
remote chunk, also in the backward pass, which recomputes the probabilities of a chunk from the
saved lse; dK and dV of a chunk rotate with it.
"""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from xsake.attention import BlockSparseAttention
from xsake.attention.runtime_pruning import prune_blocks, pruning_sources
from xsake.attention.sharded import (
    build_layout,
    is_shared,
    num_parts,
    partition_specs,
    split_layout,
    split_over_mesh,
)
from xsake.distributed.load_balancing import (
    EMPTY,
    Assignment,
    assign_zigzag,
    check_num_blocks,
    zigzag_block,
    zigzag_shard,
)
from xsake.distributed.shard_schedule import (
    ShardSchedule,
    build_local_schedule,
    build_static_schedules,
    shard_route,
)
from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels import online_softmax
from xsake.kernels.block_sparse.api import block_sparse, block_sparse_backward
from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs
from xsake.kernels.dispatch import Implementation
from xsake.layout import BlockLayout
from xsake.layout.csr import Items, compact
from xsake.layout.grid import BlockGrid
from xsake.masks import AbstractMask

CONTEXT_AXIS = "context"
Exchange = Literal["gather", "ring"]


@dataclasses.dataclass(frozen=True)
class ContextParallel(BlockSparseAttention):
    """Self-attention with tokens sharded over the mesh axis "context".

    Arrays are global; tokens are contiguous shards along "context", the batch is sharded along
    "data" and "fsdp", heads along "tensor", if the mesh has these axes. During the call, query
    blocks are scattered to their assigned shards, equally many each, so that all shards have
    nearly the same number of listed blocks. Results and gradients equal those of one device.

    Args:
        exchange: "gather" all-gathers keys and values and runs one kernel call. "ring" rotates
            them chunk by chunk: a shard holds one remote chunk at a time, also in the backward
            pass.
        assignment: "work" balances the listed blocks. If these are known only at run time (traced
            layout, or pruning by segment ids or positions), queries are temporarily all-gathered.
            "zigzag" ignores the lists: balanced for causal masks and windows, no all-gather.

    Example:
        >>> import jax
        >>> from xsake.distributed import ContextParallel, MeshShape, make_mesh
        >>> from xsake.masks import Causal
        >>> mesh = make_mesh(MeshShape(), jax.devices()[:1])
        >>> attend = ContextParallel(mesh=mesh, exchange="ring", block_q=64, block_kv=64)
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 300, 4, 32))
        >>> attend(q, k, v, mask=Causal()).shape
        (1, 300, 4, 32)
    """

    exchange: Exchange = "gather"
    assignment: Assignment = "work"

    def __post_init__(self):
        super().__post_init__()
        for name, options in (("exchange", ("gather", "ring")), ("assignment", ("work", "zigzag"))):
            if getattr(self, name) not in options:
                raise ArgumentError(
                    "context-choice", f"unknown {name}", got=repr(getattr(self, name)),
                    expected=" or ".join(map(repr, options)),
                )  # fmt: skip
        if self.mesh is None or CONTEXT_AXIS not in self.mesh.shape:
            raise ArgumentError(
                "context-axis",
                "context parallelism needs a mesh with the axis 'context'",
                got="no mesh" if self.mesh is None else f"axes {self.mesh.axis_names}",
                fix="use make_mesh(MeshShape(context=...))",
            )

    def _attend(self, inputs: BlockSparseInputs, config: BlockSparseConfig, sinks: Any) -> Any:
        _check_self_attention(inputs)
        mesh = self.mesh
        assert mesh is not None, "checked at construction"
        if mesh.shape[CONTEXT_AXIS] == 1:
            return super()._attend(inputs, config, sinks)
        return _attention(self, mesh, inputs, config, sinks)


def _check_self_attention(inputs: BlockSparseInputs) -> None:
    q_tokens, kv_tokens = inputs.q.shape[1], inputs.k.shape[1]
    if q_tokens != kv_tokens:
        raise UnsupportedError(
            "context-self-attention", "context parallelism supports only self-attention",
            got=f"{q_tokens} queries, {kv_tokens} keys", expected="as many queries as keys",
            fix="use BlockSparseAttention for decoding",
        )  # fmt: skip
    if inputs.bias is not None:
        raise UnsupportedError(
            "context-bias",
            "context parallelism does not support a bias",
            got=f"bias {inputs.bias.shape}, or booleans that are traced or differ within the batch",
            expected="None: a bias needs O(T^2) memory",
            fix="use a mask of xsake.masks, or BlockSparseAttention",
        )


@dataclasses.dataclass(frozen=True)
class _ContextProgram:
    """Static arguments: the cache key of the compiled program."""

    attend: ContextParallel
    mesh: Mesh
    problem: BlockSparseConfig
    grid: BlockGrid  # grid of one (batch, head) part
    mask: AbstractMask | None
    has_static_schedule: bool
    specs: tuple[tuple[str, PartitionSpec], ...]
    data_spec: PartitionSpec

    @property
    def shards(self) -> int:
        return self.mesh.shape[CONTEXT_AXIS]

    @property
    def is_ring(self) -> bool:
        return self.attend.exchange == "ring"

    @property
    def implementation(self) -> Implementation:
        return self.attend.implementation

    @property
    def shard_q_tokens(self) -> int:
        """Queries per shard, padded to whole blocks."""
        return -(-self.grid.q_blocks // self.shards) * self.grid.block_q

    @property
    def chunk_kv_tokens(self) -> int:
        """Keys per ring chunk, padded to whole blocks."""
        return -(-self.grid.kv_blocks // self.shards) * self.grid.block_kv

    @property
    def padded_kv_tokens(self) -> int:
        """Keys of all shards, padded."""
        shard_tokens = -(-self.grid.kv_tokens // self.shards)
        return self.shards * (self.chunk_kv_tokens if self.is_ring else shard_tokens)


def _attention(
    attend: ContextParallel,
    mesh: Mesh,
    operands: BlockSparseInputs,
    problem: BlockSparseConfig,
    sinks,
):
    """Return `(out, lse)`; static layouts are scheduled here, others inside the program."""
    split, layout = split_over_mesh(mesh, operands), operands.layout
    shards, shared = mesh.shape[CONTEXT_AXIS], is_shared(layout, split)
    check_num_blocks(layout.q_blocks, shards)
    arrays = {**operands._asdict(), "sinks": sinks}
    del arrays["layout"]
    arrays = {name: x for name, x in arrays.items() if x is not None}
    parts = (1, 1) if shared else num_parts(layout, split)
    has_static_schedule = layout.is_static and not pruning_sources(operands)
    if has_static_schedule:
        data = build_static_schedules(layout, parts, shards, attend.assignment)
        by_batch, by_head = split.batch_axes, split.head_axis
        by_batch, by_head = by_batch if parts[0] > 1 else None, by_head if parts[1] > 1 else None
        data_spec = PartitionSpec(by_batch, by_head, CONTEXT_AXIS)
    elif shared:
        data = Items(layout.row_starts, layout.kv_block, layout.is_partial)
        data_spec = PartitionSpec()
    else:
        data, data_spec = (
            split_layout(layout, split),
            PartitionSpec(split.batch_axes, split.head_axis),
        )
    whole = PartitionSpec(split.batch_axes, CONTEXT_AXIS, split.head_axis)
    program = _ContextProgram(
        attend=attend, mesh=mesh, problem=problem,
        grid=layout.grid.replace(batch=layout.batch // parts[0], heads=layout.heads // parts[1]),
        mask=layout.mask, has_static_schedule=has_static_schedule,
        specs=tuple((partition_specs(arrays, split) | dict.fromkeys("qkv", whole)).items()),
        data_spec=data_spec,
    )  # fmt: skip
    return _run(program, arrays, data)


# Jitted so that calls outside jit compile once.
@functools.partial(jax.jit, static_argnums=0)
def _run(program: _ContextProgram, arrays, data):
    """Run the program on global arrays."""
    specs = dict(program.specs)
    run = jax.shard_map(
        functools.partial(_on_shard, program),
        mesh=program.mesh,
        in_specs=(specs, program.data_spec),
        out_specs=(specs["q"], specs["q"]),
        check_vma=False,
    )
    q_tokens, kv_tokens = program.shards * program.shard_q_tokens, program.padded_kv_tokens
    sizes = {"q": q_tokens, "k": kv_tokens, "v": kv_tokens}
    padded = {name: _pad_tokens(arrays[name], tokens) for name, tokens in sizes.items()}
    out, lse = run({**arrays, **padded}, data)
    tokens = program.grid.q_tokens
    return out[:, :tokens], lse[:, :tokens]


def _pad_tokens(x, tokens: int, fill: int = 0):
    padding = tokens - x.shape[1]
    if padding == 0:
        return x
    return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def _on_shard(program: _ContextProgram, arrays: dict[str, Any], data: Any):
    """Compute the part of one device."""
    arrays = dict(arrays)
    sinks = arrays.pop("sinks", None)
    schedule, grid = _schedule(program, arrays, data)
    grid = grid.replace(q_tokens=program.shard_q_tokens)
    operands = BlockSparseInputs(**arrays, layout=build_layout(schedule.items, grid, program.mask))
    q = schedule.route.scatter(operands.q, CONTEXT_AXIS)
    operands = operands._replace(
        q=q,
        q_positions=_shard_positions(program, schedule, operands.q_positions),
        q_segment_ids=_shard_values(program, schedule, operands.q_segment_ids, EMPTY),
    )
    run = _ring if program.is_ring else _gather
    results = run(program, operands, sinks)
    return tuple(schedule.route.gather_back(x, CONTEXT_AXIS) for x in results)


def _schedule(
    program: _ContextProgram, arrays: dict[str, Any], data: Any
) -> tuple[ShardSchedule, BlockGrid]:
    """Return the schedule of this shard and the grid of the lists it was built from."""
    if program.has_static_schedule:
        return jax.tree.map(lambda x: x.reshape(x.shape[3:]), data), program.grid
    layout = build_layout(data, program.grid, program.mask)
    layout = prune_blocks(BlockSparseInputs(**arrays, layout=layout)).layout
    return build_local_schedule(
        layout, program.shards, program.attend.assignment, CONTEXT_AXIS
    ), layout.grid


def _shard_values(program: _ContextProgram, schedule: ShardSchedule, values: Any, fill: int) -> Any:
    """Select the entries of [B, T] integers of the queries of this shard."""
    if values is None:
        return None
    whole = _pad_tokens(values, program.shards * program.shard_q_tokens, fill)
    blocks = whole.reshape(whole.shape[0], -1, program.grid.block_q)
    return blocks[:, jnp.maximum(schedule.assigned, 0)].reshape(whole.shape[0], -1)


def _shard_positions(program: _ContextProgram, schedule: ShardSchedule, positions: Any) -> Any:
    if positions is not None or program.mask is None:
        return _shard_values(program, schedule, positions, 0)
    block = program.grid.block_q
    first = jnp.maximum(schedule.assigned, 0)[:, None] * block
    return (first + jnp.arange(block, dtype=jnp.int32)[None, :]).reshape(1, -1)


def _gather(program: _ContextProgram, operands: BlockSparseInputs, sinks):
    """All-gather keys and values; its transpose reduce-scatters their gradients."""
    tokens = program.grid.kv_tokens
    k, v = (
        jax.lax.all_gather(x, CONTEXT_AXIS, axis=1, tiled=True)[:, :tokens]
        for x in (operands.k, operands.v)
    )
    operands = operands._replace(k=k, v=v)
    return block_sparse(
        operands, program.problem, implementation=program.implementation, sinks=sinks
    )


def _ring(program: _ContextProgram, operands: BlockSparseInputs, sinks):
    """Assign K/V blocks in zigzag order and rotate them around the ring."""
    layout, tokens, padded = operands.layout, program.grid.kv_tokens, program.padded_kv_tokens
    route = shard_route(assign_zigzag(program.grid.kv_blocks, program.shards), CONTEXT_AXIS)
    k, v = (route.scatter(x, CONTEXT_AXIS) for x in (operands.k, operands.v))
    q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
    if kv_ids is None and tokens % layout.block_kv:  # mask the overhanging block
        q_ids = jnp.zeros(operands.q.shape[:2], jnp.int32)
        kv_ids = jnp.zeros((k.shape[0], tokens), jnp.int32)
    inputs = _RingInputs(
        Items(layout.row_starts, layout.kv_block, layout.is_partial),
        operands.q_positions,
        None if operands.kv_positions is None else _pad_tokens(operands.kv_positions, padded),
        q_ids,
        None if kv_ids is None else _pad_tokens(kv_ids, padded, EMPTY),
    )
    grid = layout.grid.replace(kv_tokens=program.chunk_kv_tokens)
    out, lse = _ring_attention((program, grid), operands.q, k, v, inputs)
    return (out, lse) if sinks is None else online_softmax.add_sinks(out, lse, sinks)


_RingStatic = tuple[_ContextProgram, BlockGrid]
"""Static arguments: the program, and the grid of this shard's query blocks and one kv chunk."""


class _RingInputs(NamedTuple):
    """Block lists, positions and segment ids; those of keys cover the whole padded sequence."""

    items: Items  # kv blocks of the whole sequence
    q_positions: Any  # [B or 1, shard tokens] or None
    kv_positions: Any  # [B or 1, all tokens] or None
    q_segment_ids: Any  # [B, shard tokens] or None
    kv_segment_ids: Any  # [B, all tokens] or None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(ring: _RingStatic, q, k, v, inputs: _RingInputs):
    """Return `(out, lse)` of this shard's queries over the keys of all shards.

    `k` and `v` are the local chunk; chunk `c` has the kv blocks of shard `c` in zigzag order.
    """
    program, _ = ring
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    out = jnp.zeros((*q.shape[:3], v.shape[-1]), dtype)
    lse = jnp.full(q.shape[:3], -jnp.inf, dtype)

    def step(carry, step_index):
        k, v, out, lse = carry
        operands = _chunk_inputs(ring, q, k, v, inputs, step_index)
        chunk = block_sparse(operands, program.problem, implementation=program.implementation)
        out, lse = online_softmax.merge(out, lse, *(x.astype(dtype) for x in chunk))
        return (*_rotate(program.shards, k, v), out, lse), None

    (_, _, out, lse), _ = jax.lax.scan(step, (k, v, out, lse), jnp.arange(program.shards))
    return out.astype(q.dtype), lse


def _ring_forward(ring: _RingStatic, q, k, v, inputs: _RingInputs):
    out, lse = _ring_attention(ring, q, k, v, inputs)
    return (out, lse), (q, k, v, inputs, out, lse)


def _ring_backward(ring: _RingStatic, residuals, cotangents):
    program, _ = ring
    q, k, v, inputs, out, lse = residuals
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    zeros = [jnp.zeros(x.shape, dtype) for x in (q, k, v)]

    def step(carry, step_index):
        k, v, dq, dk, dv = carry
        operands = _chunk_inputs(ring, q, k, v, inputs, step_index)
        grads = block_sparse_backward(
            operands, program.problem, out, lse, *cotangents, implementation=program.implementation
        )
        dq, dk, dv = (x + y.astype(dtype) for x, y in zip((dq, dk, dv), grads[:3], strict=True))
        k, v, dk, dv = _rotate(program.shards, k, v, dk, dv)
        return (k, v, dq, dk, dv), None

    (_, _, *grads), _ = jax.lax.scan(step, (k, v, *zeros), jnp.arange(program.shards))
    return *(x.astype(y.dtype) for x, y in zip(grads, (q, k, v), strict=True)), None


_ring_attention.defvjp(_ring_forward, _ring_backward)


def _rotate(shards: int, *arrays):
    """Send arrays to the next shard."""
    pairs = [(shard, (shard + 1) % shards) for shard in range(shards)]
    return tuple(jax.lax.ppermute(x, CONTEXT_AXIS, pairs) for x in arrays)


def _chunk_inputs(ring: _RingStatic, q, k, v, inputs: _RingInputs, step_index) -> BlockSparseInputs:
    """Return the operands of this shard's queries and the chunk of this step."""
    program, grid = ring
    chunk = (jax.lax.axis_index(CONTEXT_AXIS) - step_index) % program.shards
    blocks = zigzag_block(jnp, chunk, jnp.arange(grid.kv_blocks), program.shards)

    def select_chunk(x):
        if x is None:
            return None
        by_block = x.reshape(x.shape[0], -1, grid.block_kv)
        return by_block[:, blocks].reshape(x.shape[0], -1)

    kv_positions = select_chunk(inputs.kv_positions)
    if kv_positions is None and program.mask is not None:
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


def _chunk_layout(ring: _RingStatic, items: Items, chunk) -> BlockLayout:
    """Return the layout of the listed blocks of one chunk, with indices relative to the chunk."""
    program, grid = ring
    capacity = items.kv_block.shape[0]
    in_chunk = zigzag_shard(jnp, items.kv_block, program.shards) == chunk
    keep = in_chunk & (jnp.arange(capacity) < items.row_starts[-1])
    chunk_index = items.kv_block // program.shards
    chunk_items = compact(jnp, keep, items.row_starts[:-1], None, chunk_index, items.is_partial)
    return build_layout(Items(*chunk_items), grid, program.mask)
