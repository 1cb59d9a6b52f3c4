"""`xsake.native_sparse_attention`: gated compressed, selected and window branches."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from xsake.attention.block_sparse import attention
from xsake.attention.native_blocks import Blocks, Branches, Compress, Gates, as_branches
from xsake.attention.sharded import map_over_mesh
from xsake.attention.validation import check_arrays, no_runtime_typecheck
from xsake.attention.varlen import PackedSequences, align_sequences
from xsake.errors import ArgumentError, ShapeError, UnsupportedError
from xsake.kernels import sharding
from xsake.kernels.compressed import compressed_attention
from xsake.kernels.compressed import types as pooling
from xsake.kernels.compressed.summaries import means, num_summaries, runs
from xsake.kernels.selected import selected_attention
from xsake.kernels.selected import types as selecting
from xsake.kernels.sharding import placing_of
from xsake.kernels.validation import number
from xsake.masks import Causal, Window


@no_runtime_typecheck
def native_sparse_attention(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k: Float[Array | np.ndarray, "B Tk Hk D"] | Branches,
    v: Float[Array | np.ndarray, "B Tk Hk Dv"] | Branches,
    gates: Gates,
    *,
    blocks: Blocks = Blocks(),  # noqa: B008 (frozen)
    compress: tuple[Compress, Compress] | None = None,
    block_indices: Int[Array | np.ndarray, "B Tq Hk Ns"] | None = None,
    block_counts: int | Int[Array | np.ndarray, "B Tq Hk"] | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Array | np.ndarray, " S"] | None = None,
    return_blocks: bool = False,
    mesh: Mesh | None = None,
    implementation: str | None = None,
):
    """Native Sparse Attention (arXiv 2502.11089): three gated causal branches.

    `out_t = g_cmp Attn(q_t, compressed) + g_slc Attn(q_t, blocks) + g_win Attn(q_t, window)`.
    A compressed block is visible once all its tokens are in the past. Blocks are selected by the
    attention probabilities of the compressed blocks that overlap them, summed over the query heads
    of a kv head. By default the first block, the query's block and the one before are forced.
    Selection is not differentiated. Memory is linear in T.

    Args:
        q: queries [B, T, Hq, D].
        k: keys [B, T, Hk, D] of all branches, or `Branches`.
        v: values [B, T, Hk, Dv] of all branches, or `Branches`.
        gates: factor of each branch; a branch without a gate is not computed.
        blocks: block sizes.
        compress: functions that compress blocks of keys and of values; None: mean.
        block_indices: blocks to use instead of selection: block indices within the sequence.
            Negative and future blocks are ignored, duplicates count once.
        block_counts: number of selected blocks: an int that replaces `blocks.count`, or one per
            token and kv head, at most `blocks.count`.
        scale: factor on q.k; None is 1 / sqrt(D).
        cu_seqlens: cumulative lengths of packed sequences, [sequences + 1]; needs batch size 1.
            Sequences do not attend to each other.
        return_blocks: also return the selected blocks, [B, T, Hk, Ns], -1 for unused slots.
        mesh: shards the batch over its axes "data" and "fsdp" and heads over "tensor", as
            `xsake.BlockSparseAttention` does; tokens are not sharded.
        implementation: "xla" or "reference" for every branch; None selects one for the platform.

    Returns:
        The output [B, T, Hq, Dv] in the dtype of q, or `(output, blocks)`.

    Example:
        >>> import jax, jax.numpy as jnp, xsake
        >>> q = jax.random.normal(jax.random.key(0), (1, 100, 6, 16))
        >>> k = v = q[:, :, :2]
        >>> gates = xsake.Gates.sigmoid(jnp.zeros((1, 100, 6, 3)))
        >>> sizes = xsake.Blocks(length=8, stride=4, size=16, count=3, window=20)
        >>> xsake.native_sparse_attention(q, k, v, gates, blocks=sizes).shape
        (1, 100, 6, 16)
    """
    if isinstance(block_counts, int | np.integer):
        block_counts = _check_positive(int(block_counts))
        if block_indices is None:
            blocks = dataclasses.replace(blocks, count=block_counts)
    call = _validate(q, k, v, gates, _NsaOptions(blocks, block_counts, scale, implementation))
    packed = None
    if cu_seqlens is not None:
        packed = _align(call, cu_seqlens, mesh)
        call = call.align(packed)
    summaries = None
    if call.gates.compressed is not None or block_indices is None:
        summaries = _summaries(call, compress or (None, None), packed)
    listed = None if block_indices is None else _validate_indices(block_indices, call, packed)
    counts = _validate_counts(block_counts, call, packed)

    def attend(arrays, summaries, listed, counts):
        return _sum_branches(call._replace(**arrays), summaries, listed, counts, packed)

    arrays = {"q": call.q, "k": call.k, "v": call.v, "gates": call.gates}
    given = arrays, summaries, listed, counts
    if mesh is None:
        placing = placing_of(q=call.q, **{f"k {n}": x for n, x in call.k._asdict().items()})
        total, listed = sharding.each_part(placing, attend, *given)
    else:
        total, listed = map_over_mesh(mesh, attend, *given)
    if packed is not None:
        total = packed.unalign(total)
        listed = packed.unalign(_relative_indices(listed, packed, call.sizes.blocks.size) + 1) - 1
    return (total, listed) if return_blocks else total


@no_runtime_typecheck
def apply_native_sparse_attention(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k: Float[Array | np.ndarray, "B Tk Hk D"],
    v: Float[Array | np.ndarray, "B Tk Hk Dv"],
    block_indices: Int[Array | np.ndarray, "B Tq Hk Ns"],
    *,
    block_counts: int | Int[Array | np.ndarray, "B Tq Hk"] | None = None,
    block_size: int = 64,
    scale: float | None = None,
    cu_seqlens: Int[Array | np.ndarray, " S"] | None = None,
    implementation: str | None = None,
):
    """Compute the selected branch with given block indices.

    Args:
        q: queries [B, T, Hq, D].
        k: keys [B, T, Hk, D].
        v: values [B, T, Hk, Dv].
        block_indices: selected blocks per token and kv head; negative and future blocks are
            ignored, duplicates count once.
        block_counts: number of used slots; None: all.
        block_size: tokens per block.
        scale: factor on q.k; None is 1 / sqrt(D).
        cu_seqlens: cumulative lengths of packed sequences; see `native_sparse_attention`.
        implementation: "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None selects
            one for the platform. A named one is used or raises.

    Returns:
        The output [B, T, Hq, Dv] in the dtype of q.

    Example:
        >>> import jax, jax.numpy as jnp, xsake
        >>> q = jax.random.normal(jax.random.key(0), (1, 100, 6, 16))
        >>> blocks = (jnp.arange(100) // 16)[None, :, None, None].repeat(2, axis=2)
        >>> k = v = q[:, :, :2]
        >>> xsake.apply_native_sparse_attention(q, k, v, blocks, block_size=16).shape
        (1, 100, 6, 16)
    """
    q = jnp.asarray(q)
    return native_sparse_attention(
        q,
        k,
        v,
        Gates(None, jnp.ones(q.shape[:3], q.dtype), None),
        blocks=Blocks(1, 1, block_size, 1, first=0, local=1),
        block_indices=block_indices,
        block_counts=block_counts,
        scale=scale,
        cu_seqlens=cu_seqlens,
        implementation=implementation,
    )


def _check_positive(count: int) -> int:
    if count < 1:
        raise ArgumentError(
            "`block_counts` must be positive",
            got=count,
            expected="1 or more, or an array [B, T, Hk]",
            fix="use an array [B, T, Hk] for zero counts of single tokens",
        )
    return count


class _NsaOptions(NamedTuple):
    blocks: Blocks
    counts: Any
    scale: Any
    implementation: str | None


class _NsaCall(NamedTuple):
    """Validated arrays and options of a call."""

    q: Any
    k: Branches
    v: Branches
    gates: Gates
    sizes: _NsaOptions

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    def align(self, packed: PackedSequences) -> "_NsaCall":
        """Return the call with every sequence aligned to a block."""
        move = lambda x: None if x is None else packed.align(x)
        each = lambda x: type(x)(*map(move, x))
        return _NsaCall(move(self.q), each(self.k), each(self.v), each(self.gates), self.sizes)


def _validate(q, k, v, gates: Gates, sizes: _NsaOptions) -> _NsaCall:
    q = jnp.asarray(q)
    k, v = (Branches(*map(jnp.asarray, as_branches(x))) for x in (k, v))
    for name, key, value in zip(Branches._fields, k, v, strict=True):
        check_arrays(q, key, value)
        if key.shape[1] != q.shape[1] or key.shape[2] != k[0].shape[2]:
            raise ShapeError(
                "every branch needs as many keys as queries, and the same kv heads",
                got=f"q {q.shape}, keys of the branch {name!r} {key.shape}",
                expected=f"[{q.shape[0]}, {q.shape[1]}, {k[0].shape[2]}, {q.shape[3]}]",
                fix="positions are token indices; for decoding see `NativeSparse`",
            )
    if all(gate is None for gate in gates):
        raise ArgumentError(
            "all branches are disabled",
            got="Gates(None, None, None)",
            expected="at least one gate",
            fix="pass ones [B, T, Hq] for an unscaled branch",
        )
    given = [None if gate is None else jnp.asarray(gate) for gate in gates]
    for name, gate in zip(Gates._fields, given, strict=True):
        if gate is not None and gate.shape != q.shape[:3]:
            raise ShapeError(
                f"the gate {name!r} has the wrong shape",
                got=gate.shape,
                expected=f"[B, T, Hq] {q.shape[:3]}",
                fix="pass one value per token and query head",
            )
    scale = 1 / math.sqrt(q.shape[3])
    if sizes.scale is not None:
        scale = number("scale", sizes.scale, fix="None is 1 / sqrt(D)")
    return _NsaCall(q, k, v, Gates(*given), sizes._replace(scale=scale))


def _align(call: _NsaCall, cu_seqlens, mesh: Mesh | None) -> PackedSequences:
    if mesh is not None:
        raise UnsupportedError(
            "packed sequences are not supported on a mesh",
            got=f"cu_seqlens, and a mesh of {mesh.size} devices",
            expected="one of the two",
            fix="use one batch row per sequence",
        )
    if call.q.shape[0] != 1:
        raise ShapeError(
            "packed sequences need batch size 1",
            got=f"q {call.q.shape}",
            expected="q [1, T, Hq, D]",
            fix="concatenate all sequences and pass their cumulative lengths as cu_seqlens",
        )
    return align_sequences(jnp.asarray(cu_seqlens), call.tokens, call.sizes.blocks.size)


def _summaries(call: _NsaCall, compress, packed: PackedSequences | None):
    """Return compressed keys and values, [B, Nc, Hk, D] each."""
    blocks = call.sizes.blocks
    begins = jnp.arange(num_summaries(call.tokens, blocks.length, blocks.stride)) * blocks.stride
    if packed is not None:
        begins = begins - packed.start[begins]
    summaries = []
    for x, function in zip((call.k.compressed, call.v.compressed), compress, strict=True):
        if function is None:
            summaries.append(means(x, blocks.length, blocks.stride))
        else:
            summaries.append(function(runs(x, blocks.length, blocks.stride), begins[None]))
    return summaries


def _sum_branches(call: _NsaCall, summaries, listed, counts, packed: PackedSequences | None):
    """Return the sum of the gated branches and the selected blocks."""
    out, chosen = _compressed_branch(call, summaries, packed, listed is None)
    listed = chosen if listed is None else listed
    if call.gates.selected is not None:
        listed = _limit_slots(listed, counts)
        out.append(_selected_branch(call, listed) * call.gates.selected[..., None])
    if call.gates.window is not None:
        out.append(_window_branch(call, packed) * call.gates.window[..., None])
    return sum(out[1:], out[0]).astype(call.q.dtype), listed


def _compressed_branch(call: _NsaCall, summaries, packed: PackedSequences | None, select: bool):
    """Return the gated output of the branch, as a list, and the selected blocks."""
    if summaries is None:
        return [], None
    blocks = call.sizes.blocks
    number = -(-call.tokens // blocks.size)
    choosing = pooling.BlockSelection(blocks.size, number, blocks.count, blocks.first, blocks.local)
    problem = pooling.CompressedConfig(
        blocks.length, blocks.stride, call.sizes.scale, choosing if select else None
    )
    starts = None if packed is None else packed.start[None]
    keys, values = summaries
    operands = pooling.CompressedInputs(call.q, keys, values, None, starts)
    out, _, chosen = compressed_attention(
        operands, problem, implementation=call.sizes.implementation
    )
    gate = call.gates.compressed
    return [] if gate is None else [out * gate[..., None]], chosen


def _validate_indices(block_indices, call: _NsaCall, packed: PackedSequences | None):
    """Validate `block_indices`; future blocks and duplicates become -1."""
    listed = jnp.asarray(block_indices)
    tokens = call.tokens if packed is None else packed.position.shape[0]
    expected = (call.q.shape[0], tokens, call.k.selected.shape[2])
    fits = listed.ndim == 4 and listed.shape[:3] == expected and listed.shape[3] > 0
    if not fits or not jnp.issubdtype(listed.dtype, jnp.integer):
        raise ShapeError(
            "`block_indices` has the wrong shape or dtype",
            got=f"{listed.dtype} {listed.shape}",
            expected=f"integers [B, T, Hk, slots], here {(*expected, 'slots')}",
            fix="pass one list per token and kv head; query heads of a kv head share it",
        )
    listed = listed.astype(jnp.int32)
    if isinstance(call.sizes.counts, int):
        listed = listed[..., : call.sizes.counts]
    size = call.sizes.blocks.size
    query_block = jnp.arange(call.tokens, dtype=jnp.int32) // size
    if packed is not None:
        listed = packed.align(jnp.maximum(listed, -1))
        is_gap = (packed.source == packed.position.shape[0])[None, :, None, None]
        first = (packed.start // size)[None, :, None, None]
        listed = jnp.where(is_gap | (listed < 0), -1, listed + first)
    listed = jnp.where(listed > query_block[None, :, None, None], -1, listed)
    slots = listed.shape[-1]
    same = listed[..., :, None] == listed[..., None, :]
    earlier = jnp.tril(jnp.ones((slots, slots), bool), -1)[None, None, None]
    return jnp.where((same & earlier).any(-1), -1, jnp.maximum(listed, -1))


def _validate_counts(block_counts, call: _NsaCall, packed: PackedSequences | None):
    """Validate `block_counts`; None means all slots."""
    if block_counts is None or isinstance(block_counts, int):
        return None
    counts = jnp.asarray(block_counts)
    tokens = call.tokens if packed is None else packed.position.shape[0]
    expected = (call.q.shape[0], tokens, call.k.selected.shape[2])
    if counts.shape != expected or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ShapeError(
            "`block_counts` has the wrong shape or dtype",
            got=f"{counts.dtype} {counts.shape}",
            expected=f"a number, or integers [B, T, Hk] {expected}",
            fix="pass one count per token and kv head",
        )
    return counts if packed is None else packed.align(counts)


def _limit_slots(listed, counts):
    """Mask the slots of each list from `counts` on."""
    if counts is None:
        return listed
    slot = jnp.arange(listed.shape[-1])[None, None, None]
    return jnp.where(slot < counts[..., None], listed, -1)


def _relative_indices(listed, packed: PackedSequences, size: int):
    """Return block indices relative to the start of each sequence."""
    first = (packed.start // size)[None, :, None, None]
    return jnp.where(listed < 0, -1, listed - first)


def _selected_branch(call: _NsaCall, listed):
    problem = selecting.SelectedConfig(call.sizes.blocks.size, call.sizes.scale)
    operands = selecting.SelectedInputs(call.q, call.k.selected, call.v.selected, listed)
    return selected_attention(operands, problem, implementation=call.sizes.implementation)[0]


def _window_branch(call: _NsaCall, packed: PackedSequences | None) -> Any:
    mask = Causal() & Window(left=call.sizes.blocks.window - 1, right=0)
    ids = None if packed is None else packed.sequence[None]
    return attention(
        call.q,
        call.k.window,
        call.v.window,
        mask=mask,
        scale=call.sizes.scale,
        q_segment_ids=ids,
        implementation=call.sizes.implementation,
    )
