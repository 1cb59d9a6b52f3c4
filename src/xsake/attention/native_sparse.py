"""`xsake.native_sparse_attention`: summaries, selected blocks and a window, each gated."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from xsake.attention.arguments import check_arrays, checks_itself
from xsake.attention.block_sparse import attention
from xsake.attention.native_blocks import Blocks, Branches, Compress, Gates, branches
from xsake.attention.packed import Packed, pack
from xsake.attention.sharded import each_part
from xsake.errors import ArgumentError, ShapeError, UnsupportedError
from xsake.kernels import placed
from xsake.kernels.arguments import number
from xsake.kernels.placed import placing_of
from xsake.kernels.pooled import pooled
from xsake.kernels.pooled import problem as pooling
from xsake.kernels.pooled.compress import means, runs, summaries_of
from xsake.kernels.selected import problem as selecting
from xsake.kernels.selected import selected
from xsake.masks import Causal, Window


@checks_itself
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
    """Native Sparse Attention (arXiv 2502.11089): three causal branches, each with its softmax.

    `out_t = g_cmp Attn(q_t, summaries) + g_slc Attn(q_t, blocks) + g_win Attn(q_t, window)`.
    Summaries of overlapping runs of keys are seen once they are whole. Blocks are selected by the
    weights of the summaries that overlap them, summed over the query heads of a kv head; the first
    block, the query's own and the one before are always selected, a block counts once, and no
    gradient flows through the choice. Memory grows linearly with T.

    Args:
        q: queries [B, T, Hq, D].
        k: keys [B, T, Hk, D] of all branches, or `Branches` with keys of their own.
        v: values, likewise, [B, T, Hk, Dv].
        gates: what each branch is multiplied with; a branch without a gate is not computed.
        blocks: the sizes.
        compress: how a run of keys and a run of values become a summary; None: by their mean.
        block_indices: blocks to use instead of choosing: numbers of blocks within the sequence.
            Negative numbers and later blocks select nothing, repeated ones count once.
        block_counts: how many blocks are selected, as a number that replaces `blocks.count`, or
            for every token and kv head, of which at most `blocks.count` are used.
        scale: factor on q.k; None is 1 / sqrt(D).
        cu_seqlens: where packed sequences begin and the last one ends, [sequences + 1]; the batch
            size is then 1, and every sequence is attended to as if it were alone.
        return_blocks: also return the blocks that were used, [B, T, Hk, Ns], -1 for unused slots.
        mesh: devices to spread the call over, as `xsake.BlockSparseAttention` does: the batch over
            its axes "data" and "fsdp", heads over "tensor"; tokens stay together.
        implementation: "xla" or "reference" for every branch; None picks for the platform that
            the call is compiled for.

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
        block_counts = _positive(int(block_counts))
        if block_indices is None:
            blocks = dataclasses.replace(blocks, count=block_counts)
    call = _checked(q, k, v, gates, _Sizes(blocks, block_counts, scale, implementation))
    packed = None
    if cu_seqlens is not None:
        packed = _packed(call, cu_seqlens, mesh)
        call = call.moved(packed)
    summaries = None
    if call.gates.compressed is not None or block_indices is None:
        summaries = _summaries(call, compress or (None, None), packed)
    listed = None if block_indices is None else _given(block_indices, call, packed)
    counts = _counts(block_counts, call, packed)

    def attend(arrays, summaries, listed, counts):
        return _attended(call._replace(**arrays), summaries, listed, counts, packed)

    arrays = {"q": call.q, "k": call.k, "v": call.v, "gates": call.gates}
    given = arrays, summaries, listed, counts
    if mesh is None:
        placing = placing_of(q=call.q, **{f"k {n}": x for n, x in call.k._asdict().items()})
        total, listed = placed.each_part(placing, attend, *given)
    else:
        total, listed = each_part(mesh, attend, *given)
    if packed is not None:
        total = packed.packed(total)
        listed = packed.packed(_relative(listed, packed, call.sizes.blocks.size) + 1) - 1
    return (total, listed) if return_blocks else total


@checks_itself
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
    """The selected branch alone, with blocks that are known: every query sees the keys of its own.

    Args:
        q: queries [B, T, Hq, D].
        k: keys [B, T, Hk, D].
        v: values [B, T, Hk, Dv].
        block_indices: numbers of blocks; negative and later ones select nothing, repeated ones
            count once.
        block_counts: how many of the slots are used, from the first on; None: all.
        block_size: tokens of a block.
        scale: factor on q.k; None is 1 / sqrt(D).
        cu_seqlens: where packed sequences begin; see `native_sparse_attention`.
        implementation: "mosaic_gpu", "mosaic_tpu", "xla" or "reference"; None picks for the
            platform that the call is compiled for. A named one runs or raises.

    Returns:
        The output [B, T, Hq, Dv] in the dtype of q.

    Example:
        >>> import jax, jax.numpy as jnp, xsake
        >>> q = jax.random.normal(jax.random.key(0), (1, 100, 6, 16))
        >>> own = (jnp.arange(100) // 16)[None, :, None, None].repeat(2, axis=2)
        >>> k = v = q[:, :, :2]
        >>> xsake.apply_native_sparse_attention(q, k, v, own, block_size=16).shape
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


def _positive(count: int) -> int:
    if count < 1:
        raise ArgumentError(
            "`block_counts` must be positive",
            got=count,
            expected="1 or more blocks, or a count for every token and kv head",
            fix="set counts of single tokens to 0 in an array [B, T, Hk]",
        )
    return count


class _Sizes(NamedTuple):
    blocks: Blocks
    counts: Any
    scale: Any
    implementation: str | None


class _Call(NamedTuple):
    """The checked arrays of a call."""

    q: Any
    k: Branches
    v: Branches
    gates: Gates
    sizes: _Sizes

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    def moved(self, packed: Packed) -> "_Call":
        """The same, every sequence at the beginning of a block."""
        move = lambda x: None if x is None else packed.aligned(x)
        each = lambda x: type(x)(*map(move, x))
        return _Call(move(self.q), each(self.k), each(self.v), each(self.gates), self.sizes)


def _checked(q, k, v, gates: Gates, sizes: _Sizes) -> _Call:
    q = jnp.asarray(q)
    k, v = (Branches(*map(jnp.asarray, branches(x))) for x in (k, v))
    for name, key, value in zip(Branches._fields, k, v, strict=True):
        check_arrays(q, key, value)
        if key.shape[1] != q.shape[1] or key.shape[2] != k[0].shape[2]:
            raise ShapeError(
                "every branch needs as many keys as there are queries, and the same kv heads",
                got=f"q {q.shape}, keys of the branch {name!r} {key.shape}",
                expected=f"[{q.shape[0]}, {q.shape[1]}, {k[0].shape[2]}, {q.shape[3]}]",
                fix="positions are those of the arrays; for single tokens see `NativeSparse`",
            )
    if all(gate is None for gate in gates):
        raise ArgumentError(
            "no branch has a gate, so there is nothing to compute",
            got="Gates(None, None, None)",
            expected="at least one gate",
            fix="pass ones [B, T, Hq] for a branch that is not to be scaled",
        )
    given = [None if gate is None else jnp.asarray(gate) for gate in gates]
    for name, gate in zip(Gates._fields, given, strict=True):
        if gate is not None and gate.shape != q.shape[:3]:
            raise ShapeError(
                f"the gate {name!r} does not fit",
                got=gate.shape,
                expected=f"[B, T, Hq] {q.shape[:3]}",
                fix="one number for every token and query head",
            )
    scale = 1 / math.sqrt(q.shape[3])
    if sizes.scale is not None:
        scale = number("scale", sizes.scale, fix="None is 1 / sqrt(D)")
    return _Call(q, k, v, Gates(*given), sizes._replace(scale=scale))


def _packed(call: _Call, cu_seqlens, mesh: Mesh | None) -> Packed:
    if mesh is not None:
        raise UnsupportedError(
            "packed sequences are not spread over devices",
            got=f"cu_seqlens, and a mesh of {mesh.size} devices",
            expected="one of the two",
            fix="give every device sequences of its own, or every sequence its own batch row",
        )
    if call.q.shape[0] != 1:
        raise ShapeError(
            "packed sequences need a batch of one",
            got=f"q {call.q.shape}",
            expected="q [1, T, Hq, D]",
            fix="put all sequences one after another, and say where each begins in cu_seqlens",
        )
    return pack(jnp.asarray(cu_seqlens), call.tokens, call.sizes.blocks.size)


def _summaries(call: _Call, compress, packed: Packed | None):
    """Keys and values of the summaries, [B, Nc, Hk, D] each."""
    blocks = call.sizes.blocks
    begins = jnp.arange(summaries_of(call.tokens, blocks.length, blocks.stride)) * blocks.stride
    if packed is not None:
        begins = begins - packed.start[begins]
    made = []
    for x, function in zip((call.k.compressed, call.v.compressed), compress, strict=True):
        if function is None:
            made.append(means(x, blocks.length, blocks.stride))
        else:
            made.append(function(runs(x, blocks.length, blocks.stride), begins[None]))
    return made


def _attended(call: _Call, summaries, listed, counts, packed: Packed | None):
    """(the sum of the gated branches, the blocks that were used)."""
    out, chosen = _compressed(call, summaries, packed, listed is None)
    listed = chosen if listed is None else listed
    if call.gates.selected is not None:
        listed = _counted(listed, counts)
        out.append(_selected(call, listed) * call.gates.selected[..., None])
    if call.gates.window is not None:
        out.append(_window(call, packed) * call.gates.window[..., None])
    return sum(out[1:], out[0]).astype(call.q.dtype), listed


def _compressed(call: _Call, summaries, packed: Packed | None, chooses: bool):
    """(the gated output of the branch, as a list, and the blocks it chose)."""
    if summaries is None:
        return [], None
    blocks = call.sizes.blocks
    number = -(-call.tokens // blocks.size)
    choosing = pooling.Choosing(blocks.size, number, blocks.count, blocks.first, blocks.local)
    problem = pooling.Problem(
        blocks.length, blocks.stride, call.sizes.scale, choosing if chooses else None
    )
    starts = None if packed is None else packed.start[None]
    keys, values = summaries
    operands = pooling.Operands(call.q, keys, values, None, starts)
    out, _, chosen = pooled(operands, problem, implementation=call.sizes.implementation)
    gate = call.gates.compressed
    return [] if gate is None else [out * gate[..., None]], chosen


def _given(block_indices, call: _Call, packed: Packed | None):
    """Distinct blocks that are not of the future; -1 for all others."""
    listed = jnp.asarray(block_indices)
    tokens = call.tokens if packed is None else packed.position.shape[0]
    expected = (call.q.shape[0], tokens, call.k.selected.shape[2])
    fits = listed.ndim == 4 and listed.shape[:3] == expected and listed.shape[3] > 0
    if not fits or not jnp.issubdtype(listed.dtype, jnp.integer):
        raise ShapeError(
            "`block_indices` does not fit",
            got=f"{listed.dtype} {listed.shape}",
            expected=f"integers [B, T, Hk, slots], here {(*expected, 'slots')}",
            fix="every token and kv head has a list; the query heads of a kv head share it",
        )
    listed = listed.astype(jnp.int32)
    if isinstance(call.sizes.counts, int):
        listed = listed[..., : call.sizes.counts]
    size = call.sizes.blocks.size
    own = jnp.arange(call.tokens, dtype=jnp.int32) // size
    if packed is not None:
        listed = packed.aligned(jnp.maximum(listed, -1))
        is_gap = (packed.source == packed.position.shape[0])[None, :, None, None]
        first = (packed.start // size)[None, :, None, None]
        listed = jnp.where(is_gap | (listed < 0), -1, listed + first)
    listed = jnp.where(listed > own[None, :, None, None], -1, listed)
    slots = listed.shape[-1]
    same = listed[..., :, None] == listed[..., None, :]
    earlier = jnp.tril(jnp.ones((slots, slots), bool), -1)[None, None, None]
    return jnp.where((same & earlier).any(-1), -1, jnp.maximum(listed, -1))


def _counts(block_counts, call: _Call, packed: Packed | None):
    """How many slots every list uses; None: all that it has."""
    if block_counts is None or isinstance(block_counts, int):
        return None
    counts = jnp.asarray(block_counts)
    tokens = call.tokens if packed is None else packed.position.shape[0]
    expected = (call.q.shape[0], tokens, call.k.selected.shape[2])
    if counts.shape != expected or not jnp.issubdtype(counts.dtype, jnp.integer):
        raise ShapeError(
            "`block_counts` does not fit",
            got=f"{counts.dtype} {counts.shape}",
            expected=f"a number, or integers [B, T, Hk] {expected}",
            fix="query heads of a kv head share their blocks",
        )
    return counts if packed is None else packed.aligned(counts)


def _counted(listed, counts):
    """The first so many slots of every list, and no others."""
    if counts is None:
        return listed
    slot = jnp.arange(listed.shape[-1])[None, None, None]
    return jnp.where(slot < counts[..., None], listed, -1)


def _relative(listed, packed: Packed, size: int):
    """Numbers of blocks within the sequences of aligned tokens."""
    first = (packed.start // size)[None, :, None, None]
    return jnp.where(listed < 0, -1, listed - first)


def _selected(call: _Call, listed):
    problem = selecting.Problem(call.sizes.blocks.size, call.sizes.scale)
    operands = selecting.Operands(call.q, call.k.selected, call.v.selected, listed)
    return selected(operands, problem, implementation=call.sizes.implementation)[0]


def _window(call: _Call, packed: Packed | None) -> Any:
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
