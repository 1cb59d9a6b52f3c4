"""Context parallelism: attention whose sequence is split over devices, with equal work for each."""

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from xsake.attention import AttentionOutput, BlockSparseAttention
from xsake.attention.arguments import Rules, Scores, checks_itself, complete
from xsake.attention.sharded import (
    Split,
    attend_on_mesh,
    cut,
    is_shared,
    layout_of,
    parts_of,
    specs_of,
    split_of,
)
from xsake.attention.visibility import narrowed, narrowing
from xsake.distributed.deal import EMPTY, Deal, require_blocks, stripes
from xsake.distributed.hands import Hand, fixed_route, hand_now, hands_before
from xsake.distributed.ring import Places, Ring, ring_attention, with_sinks
from xsake.errors import ArgumentError, UnsupportedError
from xsake.kernels import select
from xsake.kernels.block_sparse.op import block_sparse
from xsake.kernels.block_sparse.problem import Operands, Problem
from xsake.layout import BlockLayout
from xsake.layout.grid import BlockGrid
from xsake.layout.ragged import Items
from xsake.masks import AbstractMask

CONTEXT_AXIS = "context"
Exchange = Literal["gather", "ring"]


@dataclasses.dataclass(frozen=True)
class ContextParallel(BlockSparseAttention):
    """`xsake.BlockSparseAttention` for self-attention whose tokens are split over devices too.

    Arrays are whole, as everywhere in JAX, and their tokens lie in equal runs along the mesh axis
    "context"; the batch lies along "data" and "fsdp", heads along "tensor", if the mesh has these.
    For the time of the call query blocks go to the shards that they are dealt to, equally many
    each, so that all shards have nearly the same number of listed blocks; results come back.
    Keys and values go to whoever needs them. Results and gradients are those of one device.

    Args:
        exchange: "gather" brings all keys and values of a sequence to every shard and is one call
            of the kernel. "ring" passes them round a chunk at a time: a shard holds one foreign
            chunk, also in the backward pass.
        deal: "work" counts the listed blocks. Where these are known only at run time, because the
            layout is traced or segment ids or positions drop blocks, queries are gathered on every
            shard for a moment. "stripes" deals query blocks to and fro, whatever they list: even
            for causal masks and windows, and no such moment.

    Example:
        >>> import jax
        >>> from xsake.distributed import ContextParallel, MeshShape, make_mesh
        >>> from xsake.masks import Causal
        >>> mesh = make_mesh(MeshShape(), jax.devices()[:1])
        >>> attend = ContextParallel(mesh=mesh, exchange="ring", block_q=64, block_kv=64)
        >>> q = k = v = jax.random.normal(jax.random.key(0), (1, 300, 4, 32))
        >>> attend(q, k, v, mask=Causal()).out.shape
        (1, 300, 4, 32)
    """

    exchange: Exchange = "gather"
    deal: Deal = "work"

    def __post_init__(self):
        super().__post_init__()
        for name, known in (("exchange", ("gather", "ring")), ("deal", ("work", "stripes"))):
            if getattr(self, name) not in known:
                raise ArgumentError(
                    f"no {name} of this name",
                    got=repr(getattr(self, name)),
                    expected=" or ".join(map(repr, known)),
                )
        if self.mesh is None or CONTEXT_AXIS not in self.mesh.shape:
            raise ArgumentError(
                "context parallelism needs a mesh with the axis 'context'",
                got="no mesh" if self.mesh is None else f"axes {self.mesh.axis_names}",
                fix="use make_mesh(MeshShape(context=...))",
            )

    @checks_itself
    def __call__(
        self,
        q: Float[Array | np.ndarray, "B T Hq D"],
        k: Float[Array | np.ndarray, "B T Hk D"],
        v: Float[Array | np.ndarray, "B T Hk Dv"],
        *,
        mask: AbstractMask | None = None,
        layout: BlockLayout | None = None,
        bias=None,
        sinks: Float[Array | np.ndarray, "Hq *S"] | None = None,
        softcap: float | None = None,
        q_segment_ids=None,
        kv_segment_ids=None,
        q_positions=None,
        kv_positions=None,
    ) -> AttentionOutput:
        """Attention with this configuration; arguments as for `xsake.attention`, but no bias.

        Returns:
            `AttentionOutput(out, lse)`: [B, T, Hq, Dv] and [B, T, Hq].
        """
        _require_self_attention(q, k, bias)
        sizes = self.block_q, self.block_kv
        ids = q_segment_ids, kv_segment_ids
        rules = Rules(mask, layout, *ids, q_positions, kv_positions, *sizes)
        scores = Scores(self.scale, softcap, None, sinks)
        if self.dtype is not None:
            q, k, v = (jnp.asarray(x).astype(self.dtype) for x in (q, k, v))
        mesh = self.mesh
        assert mesh is not None, "checked when it was made"
        if mesh.shape[CONTEXT_AXIS] == 1:
            return AttentionOutput(
                *attend_on_mesh(mesh, q, k, v, rules, scores, self.implementation)
            )
        operands, problem, sinks = complete(q, k, v, rules, scores)
        return AttentionOutput(*_attend(self, mesh, operands, problem, sinks))


def _require_self_attention(q, k, bias) -> None:
    if q.ndim == k.ndim == 4 and q.shape[1] != k.shape[1]:
        raise UnsupportedError(
            "context parallelism serves self-attention",
            got=f"{q.shape[1]} queries, {k.shape[1]} keys",
            expected="as many queries as keys",
            fix="use BlockSparseAttention for steps that extend a cache",
        )
    if bias is not None:
        raise UnsupportedError(
            "context parallelism takes no bias",
            got=f"bias {bias.shape}",
            expected="None: it would be as large as the attention that is split",
            fix="use a mask, or BlockSparseAttention",
        )


@dataclasses.dataclass(frozen=True)
class _Program:
    """What one compiled program is good for."""

    attend: ContextParallel
    mesh: Mesh
    split: Split
    problem: Problem
    grid: BlockGrid  # of the lists of one (batch, head) part
    mask: AbstractMask | None
    is_dealt: bool  # before the program runs
    specs: tuple[tuple[str, PartitionSpec], ...]
    data_spec: PartitionSpec

    @property
    def shards(self) -> int:
        return self.mesh.shape[CONTEXT_AXIS]

    @property
    def is_ring(self) -> bool:
        return self.attend.exchange == "ring"

    @property
    def own_tokens(self) -> int:
        """Queries of a shard, padded to whole blocks and to as many blocks as every shard has."""
        return -(-self.grid.q_blocks // self.shards) * self.grid.block_q

    @property
    def chunk_tokens(self) -> int:
        """Keys of a chunk of the ring, padded likewise."""
        return -(-self.grid.kv_blocks // self.shards) * self.grid.block_kv

    @property
    def kv_room(self) -> int:
        """Keys of all shards, padded."""
        return self.shards * (self.chunk_tokens if self.is_ring else self._kv_each)

    @property
    def _kv_each(self) -> int:
        return -(-self.grid.kv_tokens // self.shards)


def _attend(attend: ContextParallel, mesh: Mesh, operands: Operands, problem: Problem, sinks):
    """`(out, lse)`; lists that are known now are dealt now, others inside the program."""
    split, layout = split_of(mesh, operands), operands.layout
    shards, shared = mesh.shape[CONTEXT_AXIS], is_shared(layout, split)
    require_blocks(layout.q_blocks, shards)
    arrays = {**operands._asdict(), "sinks": sinks}
    del arrays["layout"]
    arrays = {name: x for name, x in arrays.items() if x is not None}
    parts = (1, 1) if shared else parts_of(layout, split)
    is_dealt = layout.is_static and not narrowing(operands)
    if is_dealt:
        data = hands_before(layout, parts, shards, attend.deal)
        by_batch, by_head = split.batch_axes, split.head_axis
        by_batch, by_head = by_batch if parts[0] > 1 else None, by_head if parts[1] > 1 else None
        data_spec = PartitionSpec(by_batch, by_head, CONTEXT_AXIS)
    elif shared:
        data = Items(layout.row_starts, layout.kv_block, layout.is_partial)
        data_spec = PartitionSpec()
    else:
        data, data_spec = cut(layout, split), PartitionSpec(split.batch_axes, split.head_axis)
    whole = PartitionSpec(split.batch_axes, CONTEXT_AXIS, split.head_axis)
    program = _Program(
        attend=attend,
        mesh=mesh,
        split=split,
        problem=problem,
        grid=layout.grid.replace(batch=layout.batch // parts[0], heads=layout.heads // parts[1]),
        mask=layout.mask,
        is_dealt=is_dealt,
        specs=tuple((specs_of(arrays, split) | dict.fromkeys("qkv", whole)).items()),
        data_spec=data_spec,
    )
    return _run(program, arrays, data)


# Jitted here so that calls outside `jit` compile once and not at every call.
@functools.partial(jax.jit, static_argnums=0)
def _run(program: _Program, arrays, data):
    """Run the program on whole arrays."""
    specs = dict(program.specs)
    spread = jax.shard_map(
        functools.partial(_on_shard, program),
        mesh=program.mesh,
        in_specs=(specs, program.data_spec),
        out_specs=(specs["q"], specs["q"]),
        check_vma=False,
    )
    rooms = {"q": program.shards * program.own_tokens, "k": program.kv_room, "v": program.kv_room}
    padded = {name: _padded(arrays[name], room) for name, room in rooms.items()}
    out, lse = spread({**arrays, **padded}, data)
    tokens = program.grid.q_tokens
    return out[:, :tokens], lse[:, :tokens]


def _padded(x, tokens: int, fill: int = 0):
    missing = tokens - x.shape[1]
    if missing == 0:
        return x
    return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)


def _on_shard(program: _Program, arrays: dict[str, Any], data: Any):
    """What every device does with its part."""
    arrays = dict(arrays)
    sinks = arrays.pop("sinks", None)
    hand, grid = _hand(program, arrays, data)
    grid = grid.replace(q_tokens=program.own_tokens)
    operands = Operands(**arrays, layout=layout_of(hand.items, grid, program.mask))
    q = hand.route.to_owners(operands.q, CONTEXT_AXIS)
    operands = operands._replace(
        q=q,
        q_positions=_own_positions(program, hand, operands.q_positions),
        q_segment_ids=_own_values(program, hand, operands.q_segment_ids, EMPTY),
    )
    run = _ring if program.is_ring else _gather
    found = run(program, operands, sinks)
    return tuple(hand.route.to_homes(x, CONTEXT_AXIS) for x in found)


def _hand(program: _Program, arrays: dict[str, Any], data: Any) -> tuple[Hand, BlockGrid]:
    """What this shard is dealt, and the sizes of the lists that it was dealt from."""
    if program.is_dealt:
        return jax.tree.map(lambda x: x.reshape(x.shape[3:]), data), program.grid
    layout = layout_of(data, program.grid, program.mask)
    layout = narrowed(Operands(**arrays, layout=layout)).layout
    return hand_now(layout, program.shards, program.attend.deal, CONTEXT_AXIS), layout.grid


def _own_values(program: _Program, hand: Hand, values: Any, fill: int) -> Any:
    """The part of [B, T] integers that belongs to the queries of this shard."""
    if values is None:
        return None
    whole = _padded(values, program.shards * program.own_tokens, fill)
    blocks = whole.reshape(whole.shape[0], -1, program.grid.block_q)
    return blocks[:, jnp.maximum(hand.own, 0)].reshape(whole.shape[0], -1)


def _own_positions(program: _Program, hand: Hand, positions: Any) -> Any:
    if positions is not None or program.mask is None:
        return _own_values(program, hand, positions, 0)
    block = program.grid.block_q
    first = jnp.maximum(hand.own, 0)[:, None] * block
    return (first + jnp.arange(block, dtype=jnp.int32)[None, :]).reshape(1, -1)


def _gather(program: _Program, operands: Operands, sinks):
    """All keys and values come here; the transpose of that sums and scatters their gradients."""
    tokens = program.grid.kv_tokens
    k, v = (
        jax.lax.all_gather(x, CONTEXT_AXIS, axis=1, tiled=True)[:, :tokens]
        for x in (operands.k, operands.v)
    )
    operands = operands._replace(k=k, v=v)
    backend = select.choices(operands, program.problem, program.attend.implementation)
    return block_sparse(operands, program.problem, backend=backend, sinks=sinks)


def _ring(program: _Program, operands: Operands, sinks):
    """Keys and values are dealt to and fro, so that every chunk has its share, and go round."""
    layout, tokens, room = operands.layout, program.grid.kv_tokens, program.kv_room
    route = fixed_route(stripes(program.grid.kv_blocks, program.shards), CONTEXT_AXIS)
    k, v = (route.to_owners(x, CONTEXT_AXIS) for x in (operands.k, operands.v))
    q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
    if kv_ids is None and tokens % layout.block_kv:  # the last block sticks out
        q_ids = jnp.zeros(operands.q.shape[:2], jnp.int32)
        kv_ids = jnp.zeros((k.shape[0], tokens), jnp.int32)
    ring = Ring(
        axis=CONTEXT_AXIS,
        shards=program.shards,
        problem=program.problem,
        implementation=program.attend.implementation,
        grid=layout.grid.replace(kv_tokens=program.chunk_tokens),
        mask=program.mask,
    )
    places = Places(
        Items(layout.row_starts, layout.kv_block, layout.is_partial),
        operands.q_positions,
        None if operands.kv_positions is None else _padded(operands.kv_positions, room),
        q_ids,
        None if kv_ids is None else _padded(kv_ids, room, EMPTY),
    )
    out, lse = ring_attention(ring, operands.q, k, v, places)
    return (out, lse) if sinks is None else with_sinks(out, lse, sinks)
