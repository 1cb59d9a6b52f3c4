"""Page selectors: which pages a decoding step reads, from small summaries of the pages.

A summary belongs to a page and a kv head, so that sequences which share a page share it too. The
four steps are those that serving frameworks have settled on: `initialize`, `construct`, `update`
and `retrieve_topk`.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from xsake.cache.pages import LayerPages, PagedKV
from xsake.errors import ArgumentError

Summaries = Any
"""Arrays [L, P, Hk, ...] of a selector."""


class ForcedPages(NamedTuple):
    """Pages that are always read, whatever they are estimated to hold.

    Args:
        num_sinks: tokens at the beginning.
        num_local: most recent tokens.
    """

    num_sinks: int = 1
    num_local: int = 64


class RankedPages(NamedTuple):
    """Pages by descending mass."""

    mass: Float[Array, "B Hk N"]  # inf: forced; negative: no page
    number: Int[Array, "B Hk N"]

    def list_pages(self, counts: Int[Array, "B Hk"]) -> Int[Array, "B Hk N"]:
        """Return the first `counts` and all forced pages, ascending; -1: unused."""
        rank = jnp.arange(self.number.shape[-1])[None, None]
        is_chosen = (self.mass >= 0) & ((rank < counts[..., None]) | (self.mass == jnp.inf))
        unused = jnp.iinfo(jnp.int32).max
        number = jnp.sort(jnp.where(is_chosen, self.number, unused), axis=-1)
        return jnp.where(number == unused, -1, number).astype(jnp.int32)


class PageSelector(abc.ABC):
    """Estimates which pages hold the attention of the last tokens; a frozen dataclass."""

    @abc.abstractmethod
    def summarize(
        self, keys: Float[Array, "*n Hk page D"], exists: Bool[Array, "*n page"], layer: Any
    ) -> Summaries:
        """Return the summaries of pages, a tree of `[*n, Hk, ...]`."""

    @abc.abstractmethod
    def estimate(
        self,
        q: Float[Array, "B Hk G D"],
        summaries: Summaries,
        exists: Bool[Array, "B N page"],
        layer: Any,
    ) -> Float[Array, "B Hk G N"]:
        """Estimate the log of the sum of `exp(q.k)` over the existing keys of each page.

        Args:
            q: last query of each sequence, times the scale of attention.
            summaries: of the pages of each sequence, a tree of [B, N, Hk, ...].
            exists: which slots of a page hold a token.
            layer: number of the layer.
        """

    def initialize(self, pages: PagedKV) -> Summaries:
        """Return summaries for empty pages."""
        layers, count, heads, size, dim = pages.k.shape
        keys = jax.ShapeDtypeStruct((1, heads, size, dim), jnp.float32)
        exists = jax.ShapeDtypeStruct((1, size), jnp.bool_)
        shapes = jax.eval_shape(lambda k, e: self.summarize(k, e, 0), keys, exists)
        return jax.tree.map(lambda x: jnp.zeros((layers, count, *x.shape[1:]), x.dtype), shapes)

    def construct(self, summaries: Summaries, at: LayerPages) -> Summaries:
        """Return the summaries with those of all pages of some sequences computed."""
        return self.update(summaries, at, at.page_table.shape[1] * at.pages.page_size)

    def update(self, summaries: Summaries, at: LayerPages, tokens: int) -> Summaries:
        """Return the summaries with those of the pages of the last `tokens` computed again."""
        size, count = at.pages.page_size, at.page_table.shape[1]
        number = jnp.maximum(at.lengths - tokens, 0)[:, None] // size
        number = number + jnp.arange(min(count, (tokens + size - 2) // size + 1))[None]
        page = jnp.take_along_axis(at.page_table, jnp.minimum(number, count - 1), axis=1)
        is_used = (number < count) & (number * size < at.lengths[:, None]) & (page >= 0)
        new = self.summarize(at.load_keys(page), _existing(number, at), at.layer)
        page = jnp.where(is_used, page, at.pages.num_pages)
        write = lambda old, x: old.at[at.layer, page].set(x.astype(old.dtype), mode="drop")
        return jax.tree.map(write, summaries, new)

    def masses(
        self, q: Float[Array, "B Hk G D"], summaries: Summaries, at: LayerPages
    ) -> Float[Array, "B Hk N"]:
        """Estimate the attention mass of each page, summed over the query heads of a kv head."""
        of_pages, exists = self.load_all(summaries, at)
        estimates = self.estimate(q, of_pages, exists, at.layer)
        is_page = exists.any(-1)[:, None, None]
        return jax.nn.softmax(jnp.where(is_page, estimates, -jnp.inf), axis=-1).sum(2)

    def load(self, summaries: Summaries, at: LayerPages, page: Int[Array, "B n"]) -> Summaries:
        """Return the summaries of some pages of the pool."""
        loaded = jax.tree.map(lambda x: x[at.layer, page], summaries)
        return jax.lax.optimization_barrier(loaded)  # or XLA gathers again for every use

    def load_all(
        self, summaries: Summaries, at: LayerPages
    ) -> tuple[Summaries, Bool[Array, "B N page"]]:
        """Return the summaries of every page of the sequences, and which slots hold a token."""
        number = jnp.broadcast_to(jnp.arange(at.page_table.shape[1])[None], at.page_table.shape)
        exists = _existing(number, at) & (at.page_table >= 0)[..., None]
        return self.load(summaries, at, jnp.maximum(at.page_table, 0)), exists

    def retrieve_topk(
        self,
        q: Float[Array, "B Hq D"],
        summaries: Summaries,
        at: LayerPages,
        counts: Int[Array, "B Hk"],
        *,
        scale: float,
        slots: int,
        forced: ForcedPages = ForcedPages(),  # noqa: B008 (frozen)
    ) -> Int[Array, "B Hk slots"]:
        """Return the numbers of the pages with the largest estimates, ascending; -1: unused.

        Args:
            q: last query of each sequence.
            summaries: of all pages.
            at: layer, tables and lengths.
            counts: pages to read, forced ones included.
            scale: factor on q.k.
            slots: largest number of pages that `counts` may ask for.
            forced: pages that are read in any case.
        """
        q = self.group_heads(q, at, scale)
        return self.rank(q, summaries, at, slots, forced).list_pages(counts)

    def group_heads(
        self, q: Float[Array, "B Hq D"], at: LayerPages, scale: float
    ) -> Float[Array, "B Hk G D"]:
        """Return queries times the scale, in float32, by kv head."""
        q = q.reshape(q.shape[0], at.pages.k.shape[2], -1, q.shape[-1])
        return q.astype(jnp.float32) * scale

    def rank(
        self, q: Float[Array, "B Hk G D"], summaries: Summaries, at: LayerPages, slots: int,
        forced: ForcedPages,
    ) -> RankedPages:  # fmt: skip
        """Return the first pages: those that are forced, then those with the largest estimates."""
        masses = self.masses(q, summaries, at)
        first = jnp.arange(masses.shape[-1])[None] * at.pages.page_size
        lengths = at.lengths[:, None]
        is_page = (first < lengths) & (at.page_table >= 0)
        is_local = first + at.pages.page_size > lengths - forced.num_local
        is_forced = (first < forced.num_sinks) | is_local
        masses = jnp.where(is_forced[:, None], jnp.inf, masses)
        masses = jnp.where(is_page[:, None], masses, -1.0)
        return RankedPages(*jax.lax.top_k(masses, min(slots, masses.shape[-1])))

    def bytes_per_page(self, pages: PagedKV) -> int:
        """Return the bytes of a page's summary, all kv heads of one layer."""
        summaries = jax.eval_shape(lambda: self.initialize(pages))
        leaves = jax.tree.leaves(summaries)
        total = sum(x.size * x.dtype.itemsize for x in leaves)
        return total // (pages.k.shape[0] * pages.num_pages)


@dataclasses.dataclass(frozen=True)
class Quest(PageSelector):
    """Upper bound of q.k from the smallest and largest value of each component of a page's keys."""

    def summarize(self, keys, exists, layer):
        """See `PageSelector`."""
        is_key = exists[..., None, :, None]
        least = jnp.where(is_key, keys, jnp.inf).min(-2)
        most = jnp.where(is_key, keys, -jnp.inf).max(-2)
        half = lambda x: jnp.where(jnp.isfinite(x), x, 0).astype(jnp.bfloat16)
        return half(least), half(most)

    def estimate(self, q, summaries, exists, layer):
        """See `PageSelector`."""
        least, most = (x.astype(jnp.float32) for x in summaries)
        positive, negative = jnp.maximum(q, 0), jnp.minimum(q, 0)
        dot = lambda a, b: jnp.einsum("bkgd,bnkd->bkgn", a, b)
        bound = dot(positive, most) + dot(negative, least)
        return bound + jnp.log(jnp.maximum(exists.sum(-1), 1))[:, None, None]


@dataclasses.dataclass(frozen=True, eq=False)
class Labels(PageSelector):
    """Scores of every key from a few components of 4 bits, with a factor per page and component.

    Args:
        components: by layer and kv head, components of queries and keys by descending contribution
            to scores; those of a sparsity plan. Their number is even.
    """

    components: Int[np.ndarray, "L Hk R"]

    def __post_init__(self):
        if self.components.ndim != 3 or self.components.shape[-1] % 2:
            raise ArgumentError(
                "label-components", "labels need an even number of components for each kv head",
                got=self.components.shape, expected="[layers, kv heads, R], R even",
            )  # fmt: skip

    def _chosen(self, x, layer, axis: int):
        """Components of one layer; `axis` is that of the kv heads."""
        kept = jnp.asarray(self.components)[layer]
        shape = [1] * x.ndim
        shape[axis], shape[-1] = kept.shape
        return jnp.take_along_axis(x, kept.reshape(shape), axis=-1)

    def summarize(self, keys, exists, layer):
        """See `PageSelector`."""
        x = self._chosen(keys.astype(jnp.float32), layer, keys.ndim - 3)
        x = jnp.where(exists[..., None, :, None], x, 0)
        factor = (jnp.abs(x).max(-2, keepdims=True) / 7).astype(jnp.bfloat16)
        divisor = jnp.where(factor > 0, factor, 1).astype(jnp.float32)
        codes = (jnp.clip(jnp.round(x / divisor), -7, 7) + 8).astype(jnp.uint8)
        codes = jnp.swapaxes(codes, -1, -2)  # the tokens of a page next to each other
        return codes[..., ::2, :] | codes[..., 1::2, :] << 4, factor[..., 0, :]

    def estimate(self, q, summaries, exists, layer):
        """See `PageSelector`."""
        codes, factor = summaries
        q = self._chosen(q, layer, 1)
        q = q[:, None] * factor.astype(jnp.float32)[:, :, :, None]  # [B, N, Hk, G, R]
        numbers = jnp.stack([codes & 15, codes >> 4], axis=-2).astype(jnp.float32)
        numbers = numbers.reshape(*codes.shape[:3], -1, codes.shape[-1])  # [B, N, Hk, R, page]
        # A product of arrays in memory; fused, XLA computes them again for every row of q.
        q, numbers = jax.lax.optimization_barrier((q, numbers))
        s = jnp.einsum("bnkgr,bnkrs->bnkgs", q, numbers - 8)
        s = jnp.where(exists[:, :, None, None], s, -jnp.inf)
        return jnp.moveaxis(jax.nn.logsumexp(s, axis=-1), 1, 3)


@dataclasses.dataclass(frozen=True)
class Oracle(PageSelector):
    """True masses, from all keys: what a selector could reach, not a saving."""

    def summarize(self, keys, exists, layer):
        """See `PageSelector`."""
        return keys

    def estimate(self, q, summaries, exists, layer):
        """See `PageSelector`."""
        s = jnp.einsum("bkgd,bnksd->bkgns", q, summaries.astype(jnp.float32), precision="highest")
        s = jnp.where(exists[:, None, None], s, -jnp.inf)
        return jax.nn.logsumexp(s, axis=-1)


def _existing(number: Int[Array, "B n"], at: LayerPages) -> Bool[Array, "B n page"]:
    """Return which slots of pages hold a token."""
    size = at.pages.page_size
    position = number[..., None] * size + jnp.arange(size)[None, None]
    return position < at.lengths[:, None, None]
