"""Decoding caches for a batch of rows of different lengths."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from xsake import nsa
from xsake.cache import LayerPages, PagedKV, PageSelector, PrefillState
from xsake.kernels.compressed.summaries import num_summaries
from xsake.layout.grid import register_layout

PAGE_SIZE = 16


@register_layout(
    leaves=("pages", "page_table", "lengths", "summaries", "prefill"), static=("selector",)
)
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Paged KV cache of a batch: slot i of a row holds position i, in page i // page_size.

    A row of `from_prefill` has pages of its own; a table of `xsake.cache.PageAllocator` may share
    them. With a page selector the cache keeps its summaries up to date.
    """

    pages: PagedKV
    page_table: Int[Array, "B N"]
    lengths: Int[Array, " B"]
    summaries: Any = None
    selector: PageSelector | None = None
    prefill: PrefillState | None = None  # of a sparse prefill in chunks

    @classmethod
    def empty(cls, rows: int, capacity: int, *, page_size: int = PAGE_SIZE, **sizes) -> "KVCache":
        """Create a cache without tokens; `sizes` are arguments of `PagedKV.create`."""
        count = -(-capacity // page_size)
        pages = PagedKV.create(num_pages=rows * count, page_size=page_size, **sizes)
        table = jnp.arange(rows * count, dtype=jnp.int32).reshape(rows, count)
        return cls(pages, table, jnp.zeros(rows, jnp.int32))

    @classmethod
    def from_prefill(
        cls, keys, values, lengths, capacity: int, *, index=None, page_size: int = PAGE_SIZE
    ) -> "KVCache":
        """Create a cache for `capacity` tokens from keys and values [layers, B, T, Hk, D].

        `index`: keys of a block indexer, [layers, B, T, 1, Di].
        """
        layers, batch, tokens = keys.shape[:3]
        count = -(-capacity // page_size)
        table = jnp.arange(batch * count, dtype=jnp.int32).reshape(batch, count)

        def cut(x):
            padding = ((0, 0), (0, 0), (0, count * page_size - tokens), (0, 0), (0, 0))
            x = jnp.pad(x, padding).reshape(layers, batch * count, page_size, *x.shape[3:])
            return jnp.swapaxes(x, 2, 3)

        pages = PagedKV(cut(keys), cut(values), index=None if index is None else cut(index))
        return cls(pages, table, lengths.astype(jnp.int32))

    @property
    def capacity(self) -> int:
        """Maximum number of tokens."""
        return self.page_table.shape[1] * self.pages.page_size

    @property
    def positions(self) -> Int[Array, "1 capacity"]:
        """Position of every slot."""
        return jnp.arange(self.capacity, dtype=jnp.int32)[None]

    def append(self, layer, q, k, v, count=None, index=None) -> tuple["KVCache", LayerPages]:
        """Write new tokens of one layer after the last ones; return the pages for their queries.

        Args:
            layer: number of the layer.
            q, k, v: of the new tokens, [B, T, H, D].
            count: tokens of each row that exist, [B]; None: T.
            index: keys of a block indexer, [B, T, 1, Di].
        """
        tokens = k.shape[1]
        pages = self.pages.append(layer, self.page_table, self.lengths, k, v, count, index)
        num_tokens = self.lengths + (tokens if count is None else count)
        at = self.layer_pages(layer)._replace(pages=pages, lengths=num_tokens)
        if self.selector is not None:
            at = at._replace(summaries=self.selector.update(self.summaries, at, tokens))
        cache = dataclasses.replace(self, pages=pages, summaries=at.summaries)
        at = at._replace(lengths=self.lengths + tokens)
        if self.prefill is None:
            return cache, at
        prefill = self.prefill.store_queries(layer, q)
        at = at._replace(prefill=self.prefill.get_layer(layer, num_tokens))
        return dataclasses.replace(cache, prefill=prefill), at

    def layer_pages(self, layer) -> LayerPages:
        """Return the pages of one layer."""
        return LayerPages(
            self.pages, layer, self.page_table, self.lengths, self.selector, self.summaries
        )

    def with_selector(self, selector: PageSelector | None) -> "KVCache":
        """Return the cache with the summaries of a page selector; None: without any."""
        if selector is None:
            return dataclasses.replace(self, selector=None, summaries=None)

        return self.construct_summaries(selector, selector.initialize(self.pages))

    def construct_summaries(self, selector: PageSelector, summaries: Any) -> "KVCache":
        """Return the cache with summaries in which those of its own pages are computed."""

        def construct(summaries, layer):
            return selector.construct(summaries, self.layer_pages(layer)), None

        summaries, _ = jax.lax.scan(construct, summaries, jnp.arange(self.pages.k.shape[0]))
        return dataclasses.replace(self, selector=selector, summaries=summaries)

    def advance(self, tokens: int | Int[Array, " B"]) -> "KVCache":
        """Return the cache with the length of every row increased by `tokens`."""
        return dataclasses.replace(self, lengths=self.lengths + tokens)


class KVPair(NamedTuple):
    """Keys and values, one array of each."""

    k: Float[Array, "B S Hk D"]
    v: Float[Array, "B S Hk D"]


@register_layout(leaves=("selected", "window", "summaries", "run"), static=())
@dataclasses.dataclass(frozen=True)
class NativeState:
    """State of one layer: all selectable keys, and ring buffers of the most recent ones.

    Slot i of `selected` holds position i, slot i of `summaries` summary i; slot s of a ring buffer
    holds the latest position that is s modulo its size.
    """

    selected: KVPair  # [B, capacity, Hk, D]
    window: KVPair  # ring of `config.window`
    summaries: KVPair
    run: KVPair  # of the compressed branch, ring of `config.length`

    @classmethod
    def from_prefill(
        cls, k: nsa.KV, v: nsa.KV, summaries: KVPair, lengths, config: nsa.Config, capacity: int
    ) -> "NativeState":
        """Create a state for `capacity` tokens from the keys and values of a prefill."""

        def pad(size, pair):
            return KVPair(
                *(jnp.pad(x, ((0, 0), (0, size - x.shape[1]), *[(0, 0)] * 2)) for x in pair)
            )

        def ring(size, pair):
            slot = jnp.maximum(_ring_positions(lengths - 1, size), 0)[:, :, None, None]
            return KVPair(*(jnp.take_along_axis(x, slot, axis=1) for x in pair))

        compressed, selected, window = zip(k, v, strict=True)
        number = num_summaries(capacity, config.length, config.stride)
        return cls(
            pad(capacity, selected), ring(config.window, window), pad(number, summaries),
            ring(config.length, compressed),
        )  # fmt: skip

    def append(
        self, k: nsa.KV, v: nsa.KV, position: Int[Array, " B"], config: nsa.Config, compress: tuple
    ) -> "NativeState":
        """Append a token to every row; add a summary when its run is complete."""
        rows, length = jnp.arange(position.shape[0]), config.length
        compressed, selected, window = zip(k, v, strict=True)

        def write(pair, slot, new):
            pairs = zip(pair, new, strict=True)
            return KVPair(*(x.at[rows, slot].set(each[:, 0], mode="drop") for x, each in pairs))

        run = write(self.run, position % length, compressed)
        order = (position[:, None] + 1 + jnp.arange(length)[None]) % length  # oldest first
        begin = position + 1 - length
        is_complete = (begin >= 0) & (begin % config.stride == 0)
        slot = jnp.where(is_complete, begin // config.stride, self.summaries.k.shape[1])
        summaries = [
            function(
                jnp.take_along_axis(x, order[:, :, None, None], axis=1)[:, None], begin[:, None]
            )
            for x, function in zip(run, compress, strict=True)
        ]
        return NativeState(
            write(self.selected, position, selected),
            write(self.window, position % config.window, window),
            write(self.summaries, slot, summaries),
            run,
        )

    def window_positions(self, position: Int[Array, " B"]) -> Int[Array, "B window"]:
        """Return the position of each slot of the window; empty slots get a future position."""
        positions = _ring_positions(position, self.window.k.shape[1])
        return jnp.where(positions < 0, position[:, None] + 1, positions)


@register_layout(leaves=("layers", "lengths"), static=())
@dataclasses.dataclass(frozen=True)
class NativeCache:
    """Stacked states of all layers for a batch of rows of different lengths."""

    layers: Any  # a NativeState with a leading layer axis
    lengths: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """Maximum number of tokens."""
        return self.layers.selected.k.shape[2]

    def get_layer(self, layer) -> NativeState:
        """Return the state of one layer."""
        return jax.tree.map(lambda x: x[layer], self.layers)

    def set_layer(self, layer, state: NativeState) -> "NativeCache":
        """Return the cache with a new state of one layer."""
        write = lambda old, new: old.at[layer].set(new)
        return dataclasses.replace(self, layers=jax.tree.map(write, self.layers, state))

    def advance(self, tokens: int) -> "NativeCache":
        """Return the cache with the length of every row increased by `tokens`."""
        return dataclasses.replace(self, lengths=self.lengths + tokens)


def _ring_positions(last: Int[Array, " B"], size: int) -> Int[Array, "B size"]:
    """Return the latest position up to `last` in every slot of a ring; negative if empty."""
    last = last[:, None]
    return last - (last - jnp.arange(size)[None]) % size


AnyCache = KVCache | NativeCache
"""Cache of a decoder."""
