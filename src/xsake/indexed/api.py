"""Attention to blocks that an indexer selects, and the selection alone."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from xsake.attention.packed_sequences import PackedSequences, pack_sequences
from xsake.attention.sharded import map_over_mesh
from xsake.attention.types import Implementation
from xsake.errors import ShapeError, UnsupportedError
from xsake.indexed.config import Config
from xsake.kernels.selected import selected_attention
from xsake.kernels.selected.types import SelectedConfig, SelectedInputs
from xsake.kernels.top_blocks import top_blocks
from xsake.kernels.top_blocks.types import TopBlocksInputs
from xsake.kernels.validation import (
    check_arrays,
    integers,
    no_runtime_typecheck,
    scale_or_default,
)

BlockIndices = Int[Array, "B Tq Hk Ns"]


class Index(NamedTuple):
    """Arrays of an indexer."""

    q: Float[Array, "B Tq Hi Di"]
    k: Float[Array, "B Tk Hs Di"]
    weights: Float[Array, "B Tq Hi"] | None = None


@no_runtime_typecheck
def attention(
    q: Float[Array | np.ndarray, "B Tq Hq D"],
    k: Float[Array | np.ndarray, "B Tk Hk D"],
    v: Float[Array | np.ndarray, "B Tk Hk Dv"],
    index_q: Float[Array | np.ndarray, "B Tq Hi Di"],
    index_k: Float[Array | np.ndarray, "B Tk Hs Di"],
    *,
    index_weights: Float[Array | np.ndarray, "B Tq Hi"] | None = None,
    config: Config = Config(),  # noqa: B008 (frozen)
    scale: float | None = None,
    q_positions: Int[Array | np.ndarray, "Bp Tq"] | None = None,
    cu_seqlens: Int[Array | np.ndarray, " S"] | None = None,
    return_blocks: bool = False,
    mesh: Mesh | None = None,
    implementation: Implementation = None,
):
    """Compute causal attention of every query over the blocks with the largest index scores.

    The score of a key is `q.k` of the index arrays, that of a block the maximum over its keys. The
    query heads of a kv head share their blocks; the query's own block is forced. Selection is not
    differentiated: train the indexer with `distillation_loss`. Memory is linear in T.

    Args:
        q: queries [B, Tq, Hq, D].
        k: keys [B, Tk, Hk, D].
        v: values [B, Tk, Hk, Dv].
        index_q: index queries [B, Tq, Hi, Di]; Hi is a multiple of Hk, or any number if
            `config.is_shared`. Products of the index heads of a kv head are added.
        index_k: index keys [B, Tk, Hs, Di]; Hs is 1 or Hk.
        index_weights: factor on the product of each index head, [B, Tq, Hi]; None: 1.
        config: block sizes and scores.
        scale: factor on q.k; None is 1 / sqrt(D).
        q_positions: position of each query in the keys, [B, Tq] or [Tq]; None: query i is at i.
        cu_seqlens: cumulative lengths of packed sequences, [sequences + 1]; needs batch size 1.
        return_blocks: also return the selected blocks [B, Tq, Hk, Ns], -1 for unused slots; with
            packed sequences they count from the start of each.
        mesh: shards the batch over its axes "data" and "fsdp" and heads over "tensor", as
            `xsake.BlockSparseAttention` does; tokens are not sharded.
        implementation: of the attention to selected blocks, as in `xsake.nsa.selected_attention`;
            "reference" and "xla" select by the same backend as well.

    Returns:
        The output [B, Tq, Hq, Dv] in the dtype of q, or `(output, blocks)`.

    Example:
        >>> import jax
        >>> from xsake import indexed
        >>> q = jax.random.normal(jax.random.key(0), (1, 100, 6, 16))
        >>> k = v = q[:, :, :2]
        >>> config = indexed.Config(size=16, count=3)
        >>> indexed.attention(q, k, v, k, k[:, :, :1], config=config).shape
        (1, 100, 6, 16)
    """
    q, k, v = map(jnp.asarray, (q, k, v))
    check_arrays(q, k, v)
    index = check_index(index_q, index_k, index_weights, q=q, k=k, config=config)
    q_positions = integers("q_positions", q_positions, q, shared=mesh is None, least=0)
    if q.shape[1] != k.shape[1] and q_positions is None:
        raise ShapeError(
            "indexed-positions", "queries of a longer sequence need positions",
            got=f"q {q.shape}, k {k.shape}", expected="q_positions", fix="pass q_positions=[B, Tq]",
        )  # fmt: skip
    scale = scale_or_default(scale, q)
    packed = None
    if cu_seqlens is not None:
        packed = _pack(q, q_positions, cu_seqlens, config, mesh)
        q, k, v, index = jax.tree.map(packed.align, (q, k, v, index))
    arrays = {name: x for name, x in index._asdict().items() if x is not None}
    is_shared = lambda name: config.is_shared or (name == "k" and arrays[name].shape[2] == 1)
    by_head = {name: x for name, x in arrays.items() if not is_shared(name)}
    shared = {name: x for name, x in arrays.items() if is_shared(name)}
    call = _Call(config, scale, implementation, packed)
    out, blocks = map_over_mesh(mesh, call, q, k, v, by_head, shared=(shared, q_positions))
    if packed is not None:
        blocks = jnp.where(blocks < 0, -1, blocks - packed.first_block(config.size))
        out, blocks = packed.unalign(out), packed.unalign(blocks + 1) - 1
    return (out, blocks) if return_blocks else out


@no_runtime_typecheck
def select_blocks(
    index_q: Float[Array | np.ndarray, "B Tq Hi Di"],
    index_k: Float[Array | np.ndarray, "B Tk Hs Di"],
    *,
    kv_heads: int,
    index_weights: Float[Array | np.ndarray, "B Tq Hi"] | None = None,
    config: Config = Config(),  # noqa: B008 (frozen)
    q_positions: Int[Array | np.ndarray, "Bp Tq"] | None = None,
    implementation: Implementation = None,
) -> BlockIndices:
    """Select the blocks of every query and kv head; see `attention`.

    Args:
        index_q: index queries.
        index_k: index keys.
        kv_heads: of the attention.
        index_weights: factor on the product of each index head.
        config: block sizes and scores.
        q_positions: position of each query in the keys.
        implementation: "native_cpu", "xla" or "reference"; None: the best one for the platform.

    Returns:
        Blocks, best first, -1 for unused slots. With `config.is_shared` all heads have the same.

    Example:
        >>> import jax.numpy as jnp
        >>> from xsake import indexed
        >>> keys = jnp.zeros((1, 64, 1, 4)).at[0, 20].set(1)  # in block 1
        >>> q, config = jnp.ones((1, 64, 1, 4)), indexed.Config(size=16, count=2)
        >>> print(indexed.select_blocks(q, keys, kv_heads=1, config=config)[0, -1, 0])
        [3 1]
    """
    index_q, index_k = jnp.asarray(index_q), jnp.asarray(index_k)
    like = lambda x, heads: ShapeDtypeStruct((*x.shape[:2], heads, 1), x.dtype)
    index = check_index(
        index_q, index_k, index_weights,
        q=like(index_q, kv_heads), k=like(index_k, kv_heads), config=config,
    )  # fmt: skip
    positions = integers("q_positions", q_positions, index_q, shared=True, least=0)
    return _select(index, kv_heads, config, positions, None, implementation)


def moba_index(
    q: Float[Array, "B Tq Hq D"], k: Float[Array, "B Tk Hk D"]
) -> tuple[Float[Array, "B Tq Hk D"], Float[Array, "B Tk Hk D"]]:
    """Return the index of MoBA: queries, added over the heads of a kv head, and keys.

    MoBA selects by the product of a query and the mean key of a block, so it has no parameters.
    Its authors select for every query head; here the heads of a kv head share their blocks.
    """
    heads = k.shape[2]
    return q.reshape(*q.shape[:2], heads, -1, q.shape[3]).sum(3), k


def check_index(
    index_q: Any, index_k: Any, weights: Any, *, q: Any, k: Any, config: Config
) -> Index:
    """Return the arrays of an indexer, which must fit queries and keys."""
    weights = None if weights is None else jnp.asarray(weights)
    index = Index(jnp.asarray(index_q), jnp.asarray(index_k), weights)
    kv_heads = k.shape[2]
    fits = index.q.ndim == index.k.ndim == 4 and index.q.shape[3] == index.k.shape[3]
    fits = fits and index.q.shape[:2] == q.shape[:2] and index.k.shape[:2] == k.shape[:2]
    groups = 1 if config.is_shared else kv_heads
    fits = fits and not index.q.shape[2] % groups and index.k.shape[2] in {1, groups}
    if not fits or (weights is not None and weights.shape != index.q.shape[:3]):
        raise ShapeError(
            "index-shapes", "index arrays do not fit queries and keys",
            got=", ".join(f"{k} {x.shape}" for k, x in index._asdict().items() if x is not None),
            expected=f"q {[*q.shape[:2], f'{groups} n', 'Di']}, "
            f"k {[*k.shape[:2], f'1 or {groups}', 'Di']}, weights {[*q.shape[:2], 'heads of q']}",
            fix="one or more index heads per kv head, or config.is_shared",
        )  # fmt: skip
    return index


def _pack(
    q: Array, q_positions: Any, cu_seqlens: Any, config: Config, mesh: Mesh | None
) -> PackedSequences:
    if q_positions is not None:
        raise UnsupportedError(
            "indexed-packed-positions", "packed sequences have their own positions",
            got="q_positions and cu_seqlens", expected="one of the two",
        )  # fmt: skip
    return pack_sequences(q, cu_seqlens, config.size, mesh)


class _Call(NamedTuple):
    """The call as a function of arrays, which may be those of one device."""

    config: Config
    scale: float
    implementation: Implementation
    packed: PackedSequences | None

    def __call__(
        self, q, k, v, by_head: dict[str, Array], shared: dict[str, Array],
        q_positions: Array | None,
    ):  # fmt: skip
        """Return the output and the selected blocks; the index is split over the heads, or not."""
        index = Index(**by_head, **shared)
        selects = self.implementation in ("reference", "xla")
        blocks = _select(
            index, k.shape[2], self.config, q_positions, self.packed,
            self.implementation if selects else None,
        )  # fmt: skip
        out, _ = selected_attention(
            SelectedInputs(q, k, v, blocks, q_positions),
            SelectedConfig(self.config.size, self.scale),
            implementation=self.implementation,
        )
        return out, blocks


def _select(
    index: Index,
    kv_heads: int,
    config: Config,
    q_positions: Array | None,
    packed: PackedSequences | None,
    implementation: Implementation,
) -> BlockIndices:
    starts = None if packed is None else packed.start[None]
    blocks = top_blocks(
        TopBlocksInputs(*index, q_positions, starts),
        config.top_blocks(index.k.shape[1], kv_heads),
        implementation=implementation,
    )
    return jnp.broadcast_to(blocks, (*blocks.shape[:2], kv_heads, blocks.shape[3]))
