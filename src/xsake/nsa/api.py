"""Native sparse attention: gated compressed, selected and window branches."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from xsake.attention import block_sparse
from xsake.attention.packed_sequences import PackedSequences, pack_sequences
from xsake.attention.sharded import map_over_mesh
from xsake.attention.types import Implementation
from xsake.errors import ArgumentError, ShapeError
from xsake.kernels import selected, sharding
from xsake.kernels.block_selection import BlockSelection
from xsake.kernels.compressed import compressed_attention
from xsake.kernels.compressed.summaries import means, num_summaries, runs
from xsake.kernels.compressed.types import CompressedConfig, CompressedInputs
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs
from xsake.kernels.validation import check_arrays, no_runtime_typecheck, number
from xsake.masks import Causal, Window
from xsake.nsa.config import KV, Compress, Config, Gates

BlockIndices = Int[Array, "B Tq Hk Ns"]


@no_runtime_typecheck
def attention(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k: Float[Array | np.ndarray, "B Tk Hk D"] | KV,
    v: Float[Array | np.ndarray, "B Tk Hk Dv"] | KV,
    gates: Gates,
    *,
    config: Config = Config(),  # noqa: B008 (frozen)
    compress: tuple[Compress, Compress] | None = None,
    block_indices: Int[Array | np.ndarray, "B Tq Hk Ns"] | None = None,
    block_counts: int | Int[Array | np.ndarray, "B Tq Hk"] | None = None,
    scale: float | None = None,
    cu_seqlens: Int[Array | np.ndarray, " S"] | None = None,
    return_blocks: bool = False,
    mesh: Mesh | None = None,
    implementation: Implementation = None,
):
    """Native Sparse Attention (arXiv 2502.11089): three gated causal branches.

    `out_t = g_cmp Attn(q_t, compressed) + g_slc Attn(q_t, blocks) + g_win Attn(q_t, window)`.
    A compressed block is visible once all its tokens are in the past. Blocks are selected by the
    attention probabilities of the compressed blocks that overlap them, summed over the query heads
    of a kv head. By default the first block, the query's block and the one before are forced.
    Selection is not differentiated. Memory is linear in T.

    Args:
        q: queries [B, T, Hq, D].
        k: keys [B, T, Hk, D] of all branches, or `KV`.
        v: values [B, T, Hk, Dv] of all branches, or `KV`.
        gates: factor of each branch; a branch without a gate is not computed.
        config: block sizes.
        compress: functions that compress blocks of keys and of values; None: mean.
        block_indices: blocks to use instead of selection: block indices within the sequence.
            Negative and future blocks are ignored, duplicates count once.
        block_counts: number of selected blocks: an int that replaces `config.count`, or one per
            token and kv head, at most `config.count`.
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
        >>> import jax, jax.numpy as jnp
        >>> from xsake import nsa
        >>> q = jax.random.normal(jax.random.key(0), (1, 100, 6, 16))
        >>> k = v = q[:, :, :2]
        >>> gates = nsa.Gates.sigmoid(jnp.zeros((1, 100, 6, 3)))
        >>> config = nsa.Config(length=8, stride=4, size=16, count=3, window=20)
        >>> nsa.attention(q, k, v, gates, config=config).shape
        (1, 100, 6, 16)
    """
    arrays = _validate(q, k, v, gates, block_indices, block_counts)
    if block_indices is None and isinstance(block_counts, int | np.integer):
        config = dataclasses.replace(config, count=int(block_counts))
    if scale is None:
        scale = 1 / math.sqrt(arrays.q.shape[3])
    else:
        scale = number("scale", scale, fix="None is 1 / sqrt(D)")
    packed = None
    if cu_seqlens is not None:
        packed = pack_sequences(arrays.q, cu_seqlens, config.size, mesh)
        arrays = jax.tree.map(packed.align, arrays)
    if arrays.indices is not None:
        indices = _mask_indices(arrays.indices, config.size, packed)
        arrays = arrays._replace(indices=indices)
    if arrays.gates.compressed is not None or block_indices is None:
        arrays = arrays._replace(summaries=_summarize(arrays, config, compress, packed))

    branches = _Branches(config, scale, implementation, packed)
    if mesh is None:
        keys = {f"k {name}": x for name, x in arrays.k._asdict().items()}
        placing = sharding.placing_of(q=arrays.q, **keys)
        out, indices = sharding.each_part(placing, branches, arrays)
    else:
        out, indices = map_over_mesh(mesh, branches, arrays)
    if packed is not None:
        first = packed.first_block(config.size)
        indices = jnp.where(indices < 0, -1, indices - first)
        out, indices = packed.unalign(out), packed.unalign(indices + 1) - 1
    return (out, indices) if return_blocks else out


@no_runtime_typecheck
def selected_attention(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k: Float[Array | np.ndarray, "B Tk Hk D"],
    v: Float[Array | np.ndarray, "B Tk Hk Dv"],
    block_indices: Int[Array | np.ndarray, "B Tq Hk Ns"],
    *,
    block_counts: int | Int[Array | np.ndarray, "B Tq Hk"] | None = None,
    block_size: int = 64,
    scale: float | None = None,
    cu_seqlens: Int[Array | np.ndarray, " S"] | None = None,
    implementation: Implementation = None,
):
    """Compute the selected branch with given block indices.

    Args:
        q: queries [B, T, Hq, D].
        k: keys [B, T, Hk, D].
        v: values [B, T, Hk, Dv].
        block_indices: selected blocks per token and kv head, as in `attention`.
        block_counts: number of used slots; None: all.
        block_size: tokens per block.
        scale: factor on q.k; None is 1 / sqrt(D).
        cu_seqlens: cumulative lengths of packed sequences, as in `attention`.
        implementation: "mosaic_gpu", "mosaic_tpu", "native_cpu", "xla" or "reference"; None selects
            one for the platform. A named one is used or raises.

    Returns:
        The output [B, T, Hq, Dv] in the dtype of q.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from xsake import nsa
        >>> q = jax.random.normal(jax.random.key(0), (1, 100, 6, 16))
        >>> blocks = (jnp.arange(100) // 16)[None, :, None, None].repeat(2, axis=2)
        >>> k = v = q[:, :, :2]
        >>> nsa.selected_attention(q, k, v, blocks, block_size=16).shape
        (1, 100, 6, 16)
    """
    q = jnp.asarray(q)
    return attention(
        q,
        k,
        v,
        Gates(None, jnp.ones(q.shape[:3], q.dtype), None),
        config=Config(1, 1, block_size, 1, first=0, local=1),
        block_indices=block_indices,
        block_counts=block_counts,
        scale=scale,
        cu_seqlens=cu_seqlens,
        implementation=implementation,
    )


class _Arrays(NamedTuple):
    """Validated arrays [B, T, H, ...] of a call: a pytree, aligned and sharded as a whole."""

    q: Float[Array, "B Tq Hq D"]
    k: KV
    v: KV
    gates: Gates
    indices: BlockIndices | None  # None: blocks are selected
    counts: Int[Array, "B Tq Hk"] | None  # None: all slots are used
    summaries: tuple[Float[Array, "B Nc Hk D"], Float[Array, "B Nc Hk Dv"]] | None = None


def _validate(q: Any, k: Any, v: Any, gates: Gates, indices: Any, counts: Any) -> _Arrays:
    q = jnp.asarray(q)
    k, v = (KV(*map(jnp.asarray, x if isinstance(x, KV) else KV(x, x, x))) for x in (k, v))
    for name, key, value in zip(KV._fields, k, v, strict=True):
        check_arrays(q, key, value)
        if key.shape[1] != q.shape[1] or key.shape[2] != k[0].shape[2]:
            raise ShapeError(
                "nsa-keys",
                "every branch needs as many keys as queries, and the same kv heads",
                got=f"q {q.shape}, keys of the branch {name!r} {key.shape}",
                expected=f"[{q.shape[0]}, {q.shape[1]}, {k[0].shape[2]}, {q.shape[3]}]",
                fix="positions are token indices; for decoding see `NativeSparse`",
            )
    gates = Gates(*(None if gate is None else jnp.asarray(gate) for gate in gates))
    if all(gate is None for gate in gates):
        raise ArgumentError(
            "no-branch",
            "all branches are disabled",
            got="Gates(None, None, None)",
            expected="at least one gate",
            fix="pass ones [B, T, Hq] for an unscaled branch",
        )
    for name, gate in gates._asdict().items():
        if gate is not None and gate.shape != q.shape[:3]:
            raise ShapeError(
                "nsa-gate",
                f"the gate {name!r} has the wrong shape",
                got=gate.shape,
                expected=f"[B, T, Hq] {q.shape[:3]}",
                fix="pass one value per token and query head",
            )
    if indices is not None:
        indices = _validate_integers("block_indices", indices, k.selected, "slots")
        indices = indices.astype(jnp.int32)
    if isinstance(counts, int | np.integer):
        if counts < 1:
            raise ArgumentError(
                "block-counts",
                "`block_counts` must be positive",
                got=int(counts),
                expected="1 or more, or an array [B, T, Hk]",
                fix="use an array [B, T, Hk] for zero counts of single tokens",
            )
        indices = None if indices is None else indices[..., : int(counts)]
        counts = None
    elif counts is not None:
        counts = _validate_integers("block_counts", counts, k.selected)
    return _Arrays(q, k, v, gates, indices, counts)


def _validate_integers(name: str, x: Any, k: Array, *rest: str) -> Array:
    """Return integers [B, T, Hk, *rest]; the axes `rest` may have any positive size."""
    x, shape = jnp.asarray(x), k.shape[:3]
    fits = x.ndim == 3 + len(rest) and x.shape[:3] == shape and all(x.shape[3:])
    if not fits or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ShapeError(
            "nsa-operand",
            f"`{name}` has the wrong shape or dtype",
            got=f"{x.dtype} {x.shape}",
            expected=f"integers [{', '.join(('B', 'T', 'Hk', *rest))}], here {(*shape, *rest)}",
            fix="use one entry per token and kv head; query heads of a kv head share it",
        )
    return x


def _mask_indices(indices: BlockIndices, size: int, packed: PackedSequences | None) -> BlockIndices:
    """Replace future blocks and duplicates by -1; indices count from the start of the row."""
    if packed is not None:
        is_unused = packed.is_padding[None, :, None, None] | (indices < 0)
        indices = jnp.where(is_unused, -1, indices + packed.first_block(size))
    query_block = jnp.arange(indices.shape[1], dtype=jnp.int32)[None, :, None, None] // size
    indices = jnp.where(indices > query_block, -1, jnp.maximum(indices, -1))
    slots = indices.shape[-1]
    same = indices[..., :, None] == indices[..., None, :]
    earlier = jnp.tril(jnp.ones((slots, slots), bool), -1)[None, None, None]
    return jnp.where((same & earlier).any(-1), -1, indices)


def _summarize(
    arrays: _Arrays,
    config: Config,
    compress: tuple[Compress, Compress] | None,
    packed: PackedSequences | None,
) -> tuple[Array, Array]:
    """Return compressed keys and values, [B, Nc, Hk, D] each."""
    sizes = config.length, config.stride
    begins = jnp.arange(num_summaries(arrays.q.shape[1], *sizes)) * config.stride
    if packed is not None:
        begins = begins - packed.start[begins]
    k, v = (
        means(x, *sizes) if function is None else function(runs(x, *sizes), begins[None])
        for x, function in zip(
            (arrays.k.compressed, arrays.v.compressed), compress or (None, None), strict=True
        )
    )
    return k, v


class _Branches(NamedTuple):
    """The branches as functions of arrays, which may be those of one device."""

    config: Config
    scale: float
    implementation: Implementation
    packed: PackedSequences | None

    def __call__(self, x: _Arrays) -> tuple[Array, BlockIndices]:
        """Return the sum of the gated branches and the selected blocks."""
        out, indices = [], x.indices
        if x.summaries is not None:
            branch, selection = self._compressed(x)
            indices = selection if indices is None else indices
            if x.gates.compressed is not None:
                out.append(branch * x.gates.compressed[..., None])
        assert indices is not None, "blocks are given or selected"
        if x.gates.selected is not None:
            if x.counts is not None:
                slot = jnp.arange(indices.shape[-1])[None, None, None]
                indices = jnp.where(slot < x.counts[..., None], indices, -1)
            out.append(self._selected(x, indices) * x.gates.selected[..., None])
        if x.gates.window is not None:
            out.append(self._window(x) * x.gates.window[..., None])
        return sum(out[1:], out[0]).astype(x.q.dtype), indices

    def _compressed(self, x: _Arrays) -> tuple[Array, BlockIndices | None]:
        """Return the output and, unless blocks are given, the selected blocks."""
        assert x.summaries is not None
        config, selection = self.config, None
        if x.indices is None:
            selection = BlockSelection(
                config.size, -(-x.q.shape[1] // config.size), config.count, config.first,
                config.local,
            )  # fmt: skip
        starts = None if self.packed is None else self.packed.start[None]
        out, _, indices = compressed_attention(
            CompressedInputs(x.q, *x.summaries, None, starts),
            CompressedConfig(config.length, config.stride, self.scale, selection),
            implementation=self.implementation,
        )
        return out, indices

    def _selected(self, x: _Arrays, indices: BlockIndices) -> Array:
        """Return the output over the blocks of each token."""
        operands = SelectedInputs(x.q, x.k.selected, x.v.selected, indices)
        problem = SelectedConfig(self.config.size, self.scale)
        return selected.selected_attention(operands, problem, implementation=self.implementation)[0]

    def _window(self, x: _Arrays) -> Any:
        """Return the output over the most recent tokens."""
        return block_sparse.attention(
            x.q,
            x.k.window,
            x.v.window,
            mask=Causal() & Window(left=self.config.window - 1, right=0),
            scale=self.scale,
            q_segment_ids=None if self.packed is None else self.packed.sequence[None],
            implementation=self.implementation,
        )
