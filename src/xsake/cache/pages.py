"""Pages of keys and values as arrays: append, copy, attend."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from xsake.attention import BlockSparseAttention
from xsake.errors import ArgumentError
from xsake.kernels.paged_decode import OP, paged_attention
from xsake.layout.grid import register_layout

DTYPES = ("float32", "bfloat16", "float16", "int8")
MAX_INT8 = 127
MAX_PAGED_QUERIES = 64


@register_layout(leaves=("k", "v", "k_scale", "v_scale", "index"), static=())
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Keys and values of all layers in pages; tables of pages are arguments of its methods.

    A page holds the tokens of one kv head next to each other, so that a kernel that reads some
    pages of some heads reads contiguous memory. Methods return a new value; under `jax.jit` with a
    donated cache they write in place.

    Example:
        >>> import jax.numpy as jnp
        >>> from xsake.cache import PageAllocator, PagedKV
        >>> cache = PagedKV.create(
        ...     layers=2, num_pages=8, page_size=4, kv_heads=2, head_dim=16, dtype=jnp.float32
        ... )
        >>> allocator = PageAllocator(cache.num_pages, cache.page_size)
        >>> sequence = allocator.add()
        >>> start = jnp.array([allocator.append(sequence, 6).start])
        >>> table, k = jnp.asarray(allocator.table([sequence])), jnp.ones((1, 6, 2, 16))
        >>> cache = cache.append(0, table, start, k, k)
        >>> q = jnp.ones((1, 1, 4, 16))  # the last token
        >>> cache.attend(q, 0, table, jnp.array([6])).shape
        (1, 1, 4, 16)
    """

    k: Num[Array, "L P Hk page D"]
    v: Num[Array, "L P Hk page Dv"]
    k_scale: Float[Array, "L P Hk"] | None = None  # factors of int8
    v_scale: Float[Array, "L P Hk"] | None = None
    index: Float[Array, "L P 1 page Di"] | None = None  # keys of a block indexer

    @classmethod
    def create(
        cls, *, layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int,
        dtype: Any, v_dim: int | None = None, index_dim: int | None = None,
    ) -> "PagedKV":  # fmt: skip
        """Create an empty cache.

        Args:
            layers, num_pages, page_size, kv_heads, head_dim: sizes; each layer has `num_pages`.
            dtype: of keys and values; int8 stores a factor for each page and kv head.
            v_dim: of values; None: `head_dim`.
            index_dim: of the keys of a block indexer; None: there is none.
        """
        if jnp.dtype(dtype).name not in DTYPES:
            raise ArgumentError(
                "cache-dtype", "a cache cannot have this dtype", got=jnp.dtype(dtype).name,
                expected=" or ".join(DTYPES),
            )  # fmt: skip
        shape = layers, num_pages, kv_heads, page_size
        scale = jnp.ones(shape[:3], jnp.float32) if jnp.dtype(dtype) == jnp.int8 else None
        v_dim = head_dim if v_dim is None else v_dim
        pool = lambda dim: jnp.zeros((*shape, dim), dtype)
        index = None
        if index_dim is not None:
            index_dtype = jnp.float32 if scale is not None else dtype
            index = jnp.zeros((layers, num_pages, 1, page_size, index_dim), index_dtype)
        return cls(pool(head_dim), pool(v_dim), scale, scale, index)

    @property
    def num_pages(self) -> int:
        """Pages of each layer."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k.shape[3]

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token in one layer, all kv heads, factors and index keys included."""
        tokens = self.k.shape[0] * self.num_pages * self.page_size
        arrays = (self.k, self.v, self.k_scale, self.v_scale, self.index)
        return sum(x.size * x.dtype.itemsize for x in arrays if x is not None) / tokens

    def append(
        self,
        layer: int | Int[Array, ""],
        page_table: Int[Array | np.ndarray, "B N"],
        start: Int[Array | np.ndarray, " B"],
        k: Float[Array, "B T Hk D"],
        v: Float[Array, "B T Hk Dv"],
        count: Int[Array | np.ndarray, " B"] | None = None,
        index: Float[Array, "B T 1 Di"] | None = None,
    ) -> "PagedKV":
        """Return the cache with tokens of one layer written.

        Args:
            layer: number of the layer.
            page_table: of the sequences. Tokens whose page is negative or outside are dropped.
            start: position of the first token of each sequence.
            k: keys.
            v: values.
            count: tokens of each sequence that exist; None: T. Others are not written.
            index: keys of a block indexer, if the cache has them.
        """
        target = _Target.of(self, page_table, start, k.shape[1], count)
        k_pool, k_scale = target.write(self.k, self.k_scale, layer, k)
        v_pool, v_scale = target.write(self.v, self.v_scale, layer, v)
        index_pool = self.index
        if index is not None:
            index_pool, _ = target.write(self.index, None, layer, index)
        # Without the barrier XLA copies the pool: it merges the reshape of `attend` into the write.
        pages = PagedKV(k_pool, v_pool, k_scale, v_scale, index_pool)
        return jax.lax.optimization_barrier(pages)

    def copy(self, copies: Sequence[tuple[int, int]] | Int[Array, "n 2"]) -> "PagedKV":
        """Return the cache with pages copied in every layer: pairs `(source, target)`."""
        pairs = jnp.asarray(copies, jnp.int32).reshape(-1, 2)
        return jax.tree.map(lambda x: x.at[:, pairs[:, 1]].set(x[:, pairs[:, 0]]), self)

    def gather(
        self, layer: int | Int[Array, ""], page_table: Int[Array | np.ndarray, "B N"]
    ) -> tuple[Float[Array, "B T Hk D"], Float[Array, "B T Hk Dv"]]:
        """Return a copy of keys and values of one layer, slot after slot; int8 as float32."""
        load = lambda pool, scale: _gather(pool, scale, layer, page_table)
        return load(self.k, self.k_scale), load(self.v, self.v_scale)

    def gather_index(
        self, layer: int | Int[Array, ""], page_table: Int[Array | np.ndarray, "B N"]
    ) -> Float[Array, "B T 1 Di"]:
        """Return a copy of the index keys of one layer, slot after slot."""
        return _gather(self.index, None, layer, page_table)

    def flat_table(
        self, layer: int | Int[Array, ""], page_table: Int[Array | np.ndarray, "B N"]
    ) -> Int[Array, "B N"]:
        """Return where pages lie in an array whose first axis is layers times pages.

        An operation that takes this array, and not that of a layer, copies no layer.
        """
        table = jnp.asarray(page_table)
        return jnp.where(table < 0, table, table + layer * self.num_pages)

    def attend(
        self,
        q: Float[Array, "B Tq Hq D"],
        layer: int | Int[Array, ""],
        page_table: Int[Array | np.ndarray, "B N"],
        lengths: Int[Array | np.ndarray, " B"],
        **options: Any,
    ) -> Any:
        """Return the attention of the last tokens of sequences to one layer: `paged_attention`.

        Args:
            q: queries of the last Tq tokens, whose keys have been appended.
            layer: number of the layer.
            page_table: of the sequences.
            lengths: tokens of each sequence, those of q included.
            **options: `pages`, `mask`, `scale` and others of `paged_attention`.
        """
        table = self.flat_table(layer, page_table)
        pool = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), self)
        return paged_attention(
            q, pool.k, pool.v, table, lengths, k_scale=pool.k_scale, v_scale=pool.v_scale, **options
        )


class LayerPrefill(NamedTuple):
    """Sparse prefill of one layer at a chunk of its prompts."""

    counts: Int[Array, "B Hq Nq"]  # blocks of each row of a prompt
    queries: Float[Array, "B block Hq D"]  # of the block before the chunk
    num_tokens: Int[Array, " B"]  # up to the end of the chunk, without padding


class PrefillState(NamedTuple):
    """State of a sparse prefill in chunks: budgets of its prompts, queries of their last blocks.

    An attention function makes it with `init_prefill`; the model stores the queries.
    """

    counts: Int[Array, "L B Hq Nq"]
    queries: Float[Array, "L B block Hq D"]

    @property
    def block(self) -> int:
        """Tokens of a query block."""
        return self.queries.shape[2]

    def store_queries(self, layer: Any, q: Float[Array, "B T Hq D"]) -> "PrefillState":
        """Return the state after a chunk."""
        if q.shape[1] % self.block:  # the last chunk of its prompt
            return self
        last = q[:, -self.block :].astype(self.queries.dtype)
        return self._replace(queries=self.queries.at[layer].set(last))

    def get_layer(self, layer: Any, num_tokens: Int[Array, " B"]) -> LayerPrefill:
        """Return what one layer needs."""
        return LayerPrefill(self.counts[layer], self.queries[layer], num_tokens)


class LayerPages(NamedTuple):
    """Pages of one layer for the last tokens of a batch of sequences."""

    pages: PagedKV
    layer: int | Int[Array, ""]
    page_table: Int[Array, "B N"]
    lengths: Int[Array, " B"]  # padding of a chunk included
    selector: Any = None  # a `PageSelector`, and its summaries
    summaries: Any = None
    prefill: LayerPrefill | None = None  # of a chunk by a plan

    def attend(self, q: Float[Array, "B Tq Hq D"], **options: Any) -> Any:
        """Return the attention of the last Tq tokens: `paged_attention`."""
        return self.pages.attend(q, self.layer, self.page_table, self.lengths, **options)

    def gather(self) -> tuple[Float[Array, "B T Hk D"], Float[Array, "B T Hk Dv"]]:
        """Return a copy of keys and values of every slot."""
        return self.pages.gather(self.layer, self.page_table)

    def gather_index(self) -> Float[Array, "B T 1 Di"]:
        """Return a copy of the index keys of every slot."""
        return self.pages.gather_index(self.layer, self.page_table)

    def load_keys(self, page: Int[Array, "B n"]) -> Float[Array, "B n Hk page D"]:
        """Return the keys of some pages; negative ones are page 0."""
        return _load(self.pages.k, self.pages.k_scale, self.layer, jnp.maximum(page, 0))

    def is_served_by(self, operator: BlockSparseAttention, q: Float[Array, "B Tq Hq D"]) -> bool:
        """Return whether an operator computes few queries, and its backend attends to pages.

        For many queries, a copy of keys and values costs less than reading them page by page.
        """
        names = operator.implementation
        names = (names,) if isinstance(names, str) else names or ()
        known = {spec.name for spec in OP.backends}
        is_short = q.shape[1] <= MAX_PAGED_QUERIES
        return is_short and operator.mesh is None and known.issuperset(names)


def _gather(pool, scale, layer, page_table: Any) -> Float[Array, "B T H D"]:
    """Return a copy of some pages of a pool, slot after slot."""
    table = jnp.maximum(jnp.asarray(page_table), 0)
    x = _load(pool, scale, layer, table)
    return jnp.swapaxes(x, 2, 3).reshape(table.shape[0], -1, x.shape[2], x.shape[4])


def _load(pool, scale, layer, page: Int[Array, "B n"]) -> Float[Array, "B n Hk page D"]:
    """Return some pages of a pool; int8 as float32."""
    x = pool[layer, page]
    return x if scale is None else x.astype(jnp.float32) * scale[layer, page][..., None, None]


@dataclasses.dataclass(frozen=True)
class _Target:
    """Pages that a call of `append` writes to, and which token goes where."""

    page: Any  # [B, n]; out of range: none
    token: Any  # [B, n, page]: index of the token that is written there
    is_new: Any  # [B, n, page]
    is_old: Any  # [B, n, page]: an earlier token

    @classmethod
    def of(cls, cache: PagedKV, page_table, start, tokens: int, count) -> "_Target":
        size, table = cache.page_size, jnp.asarray(page_table).astype(jnp.int32)
        start = jnp.asarray(start).astype(jnp.int32)[:, None]
        count = tokens if count is None else jnp.asarray(count).astype(jnp.int32)[:, None]
        number = start // size + jnp.arange((tokens + size - 2) // size + 1)[None]
        inside = (number < table.shape[1]) & (number * size < start + count)
        page = jnp.take_along_axis(table, jnp.minimum(number, table.shape[1] - 1), axis=1)
        page = jnp.where(inside & (page >= 0), page, cache.num_pages)
        token = number[..., None] * size + jnp.arange(size)[None, None] - start[..., None]
        is_new = (token >= 0) & (token < (count if isinstance(count, int) else count[..., None]))
        return cls(page, jnp.clip(token, 0, tokens - 1), is_new, token < 0)

    def write(self, pool, scale, layer, x: Float[Array, "B T Hk D"]) -> tuple[Any, Any]:
        """Return the pool and the factors with `x` written to the pages of one layer."""
        batch, n, size = self.token.shape
        new = jnp.take_along_axis(x, self.token.reshape(batch, -1)[..., None, None], axis=1)
        new = jnp.swapaxes(new.reshape(batch, n, size, *x.shape[2:]), 2, 3)
        at = jnp.minimum(self.page, pool.shape[1] - 1)
        is_new, is_old = self.is_new[:, :, None, :, None], self.is_old[:, :, None, :, None]
        old = pool[layer, at]
        if scale is None:
            merged = jnp.where(is_new, new.astype(pool.dtype), old)
            return pool.at[layer, self.page].set(merged, mode="drop"), None
        # A factor only grows while a page fills; numbers of earlier tokens stay as they are if it
        # does not.
        largest = jnp.where(is_new, jnp.abs(new.astype(jnp.float32)), 0).max((3, 4)) / MAX_INT8
        before = jnp.where(self.is_old.any(-1)[..., None], scale[layer, at], 0)
        factor = jnp.maximum(largest, before)
        divisor = jnp.where(factor > 0, factor, 1)[..., None, None]
        earlier = old.astype(jnp.float32) * before[..., None, None]
        merged = jnp.where(is_new, new.astype(jnp.float32), jnp.where(is_old, earlier, 0))
        numbers = jnp.round(merged / divisor).astype(jnp.int8)
        return (
            pool.at[layer, self.page].set(numbers, mode="drop"),
            scale.at[layer, self.page].set(factor, mode="drop"),
        )
