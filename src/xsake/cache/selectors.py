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
from xsake.kernels.page_labels import label_scores

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


class PageMasses(NamedTuple):
    """Estimated attention mass of the pages of sequences."""

    mass: Float[Array, "B Hk N"]  # inf: forced; -1: no page

    def order(self) -> Int[Array, "B Hk N"]:
        """Return the numbers of pages by descending mass; of equals, the first one first."""
        return jnp.argsort(-self.mass, axis=-1, stable=True)

    def list_pages(self, counts: Int[Array, "B Hk"], slots: int) -> Int[Array, "B Hk slots"]:
        """Return the first `counts` and all forced pages of `order`, ascending; -1: unused.

        Without a sort, which takes most of the time of a step on CPUs.
        """
        is_page, is_forced = self.mass >= 0, self.mass == jnp.inf
        counts = jnp.maximum(counts, is_forced.sum(-1))
        least = _kth_largest(self.mass, jnp.minimum(counts, is_page.sum(-1)))[..., None]
        is_above, is_equal = self.mass > least, (self.mass == least) & is_page
        room = counts[..., None] - is_above.sum(-1, keepdims=True)
        is_chosen = is_above | (is_equal & (jnp.cumsum(is_equal, axis=-1) <= room))
        slot = jnp.where(is_chosen, jnp.cumsum(is_chosen, axis=-1) - 1, slots)
        lists = jnp.full((*counts.shape, slots), -1, jnp.int32)
        batch, head = jnp.ogrid[: counts.shape[0], : counts.shape[1]]
        number = jnp.arange(self.mass.shape[-1], dtype=jnp.int32)[None, None]
        return lists.at[batch[..., None], head[..., None], slot].set(number, mode="drop")


def _kth_largest(x: Float[Array, "B Hk N"], k: Int[Array, "B Hk"]) -> Float[Array, "B Hk"]:
    """Return the k-th largest of numbers, negative ones left out; inf for k = 0."""
    # Floats that are not negative are ordered as their bits; those of negative ones are negative.
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)

    def halve(_, limits):
        low, high = limits
        middle = low + (high - low) // 2
        is_enough = (bits >= middle[..., None]).sum(-1) >= k
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    low, high = jnp.zeros_like(k), jnp.full_like(k, 0x7F800001)  # above inf
    low, _ = jax.lax.fori_loop(0, 31, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


class PageSelector(abc.ABC):
    """Estimates which pages hold the attention of the last tokens; a frozen dataclass."""

    @abc.abstractmethod
    def summarize(
        self, keys: Float[Array, "*n Hk page D"], exists: Bool[Array, "*n page"], layer: Any
    ) -> Summaries:
        """Return the summaries of pages, a tree of `[*n, Hk, ...]`."""

    @abc.abstractmethod
    def estimate(
        self, q: Float[Array, "B Hk G D"], summaries: Summaries, at: LayerPages
    ) -> Float[Array, "B Hk G N"]:
        """Estimate the log of the sum of `exp(q.k)` over the keys of each page of the sequences.

        Args:
            q: last query of each sequence, times the scale of attention.
            summaries: of all pages.
            at: layer, tables and lengths.
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
        # Without the barrier XLA copies the summaries of all pages, as in `PagedKV.append`.
        return jax.lax.optimization_barrier(jax.tree.map(write, summaries, new))

    def masses(
        self, q: Float[Array, "B Hk G D"], summaries: Summaries, at: LayerPages
    ) -> Float[Array, "B Hk N"]:
        """Estimate the attention mass of each page, summed over the query heads of a kv head."""
        estimates = jnp.where(
            _is_page(at)[:, None, None], self.estimate(q, summaries, at), -jnp.inf
        )
        return jax.nn.softmax(estimates, axis=-1).sum(2)

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
        slots = min(slots, at.page_table.shape[1])
        return self.weigh(q, summaries, at, forced).list_pages(counts, slots)

    def group_heads(
        self, q: Float[Array, "B Hq D"], at: LayerPages, scale: float
    ) -> Float[Array, "B Hk G D"]:
        """Return queries times the scale, in float32, by kv head; no gradient flows to them."""
        q = jax.lax.stop_gradient(q).reshape(q.shape[0], at.pages.k.shape[2], -1, q.shape[-1])
        return q.astype(jnp.float32) * scale

    def weigh(
        self, q: Float[Array, "B Hk G D"], summaries: Summaries, at: LayerPages,
        forced: ForcedPages,
    ) -> PageMasses:  # fmt: skip
        """Return the estimated masses of all pages, and which ones are forced."""
        masses = self.masses(q, summaries, at)
        first = jnp.arange(masses.shape[-1])[None] * at.pages.page_size
        lengths = at.lengths[:, None]
        is_local = first + at.pages.page_size > lengths - forced.num_local
        is_forced = (first < forced.num_sinks) | is_local
        masses = jnp.where(is_forced[:, None], jnp.inf, masses)
        return PageMasses(jnp.where(_is_page(at)[:, None], masses, -1.0))

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

    def estimate(self, q, summaries, at):
        """See `PageSelector`."""
        loaded, exists = self.load_all(summaries, at)
        least, most = (x.astype(jnp.float32) for x in loaded)
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

    def estimate(self, q, summaries, at):
        """See `PageSelector`."""
        codes, factor = (x.reshape(-1, *x.shape[2:]) for x in summaries)  # no layer is copied
        table = at.pages.flat_table(at.layer, at.page_table)
        return label_scores(self._chosen(q, at.layer, 1), codes, factor, table, at.lengths)


@dataclasses.dataclass(frozen=True)
class Oracle(PageSelector):
    """True masses, from all keys: what a selector could reach, not a saving."""

    def summarize(self, keys, exists, layer):
        """See `PageSelector`."""
        return keys

    def estimate(self, q, summaries, at):
        """See `PageSelector`."""
        keys, exists = self.load_all(summaries, at)
        s = jnp.einsum("bkgd,bnksd->bkgns", q, keys.astype(jnp.float32), precision="highest")
        s = jnp.where(exists[:, None, None], s, -jnp.inf)
        return jax.nn.logsumexp(s, axis=-1)


def _is_page(at: LayerPages) -> Bool[Array, "B N"]:
    """Return which pages of the sequences hold tokens."""
    first = jnp.arange(at.page_table.shape[1])[None] * at.pages.page_size
    return (first < at.lengths[:, None]) & (at.page_table >= 0)


def _existing(number: Int[Array, "B n"], at: LayerPages) -> Bool[Array, "B n page"]:
    """Return which slots of pages hold a token."""
    size = at.pages.page_size
    position = number[..., None] * size + jnp.arange(size)[None, None]
    return position < at.lengths[:, None, None]
