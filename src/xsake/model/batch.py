"""Rows of a batch for generation: each gets a prompt, is extended, and is released."""

import abc
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from xsake.attention.layer_call import AttentionFn
from xsake.cache import PageAllocator, PageSelector
from xsake.errors import ArgumentError
from xsake.model.cache import AnyCache, KVCache
from xsake.model.decoder import Decoder
from xsake.model.prefill import CompiledPrograms, Prefill
from xsake.model.speculation import Draft


def padded_length(tokens: int, context: int) -> int:
    """Round `tokens` up to one of few sizes: at most a quarter more, or to a multiple of 64.

    The block layout of `LayoutAttention` for prefill must have this length.

    Args:
        tokens: length of a row.
        context: of the model; upper limit.

    Example:
        >>> [padded_length(tokens, 8192) for tokens in (1, 65, 1000, 1100, 8000)]
        [64, 128, 1024, 1280, 8192]
    """
    unit = max(64, 2 ** (tokens.bit_length() - 3))
    return min(-(-tokens // unit) * unit, context)


class Batch(abc.ABC):
    """Rows that are decoded together; a row is free, or has the cache of one sequence.

    Args:
        model: any decoder.
        programs: compiled programs.
        rows: number of rows.
        capacity: tokens of a row.
        attend: attention function for prompts.
        decode_attend: attention function for decoding.
        draft: of tokens that `decode_attend` verifies; None: no draft.
    """

    cache: Any

    def __init__(
        self, model: Decoder, programs: CompiledPrograms, *, rows: int, capacity: int,
        attend: AttentionFn, decode_attend: AttentionFn, draft: Draft | None = None,
    ):  # fmt: skip
        self.model, self.programs, self.rows, self.capacity = model, programs, rows, capacity
        self.attend, self.decode_attend, self.draft = attend, decode_attend, draft
        self.graph, self.weights = nnx.split(model)
        self.cache = self._empty_cache()

    @abc.abstractmethod
    def _empty_cache(self) -> AnyCache: ...

    @abc.abstractmethod
    def admit(self, row: int, prompt: Any, new_tokens: int) -> Float[Array, " vocab"]:
        """Process a prompt into a free row, with space for new tokens; return its last logits."""

    @abc.abstractmethod
    def release(self, row: int) -> None:
        """Free a row."""

    def extend(
        self, tokens: Int[Array, " B"], is_active: Bool[np.ndarray, " B"]
    ) -> Float[Array, "B vocab"]:
        """Append a token to each active row; return the logits after it."""
        logits, self.cache = self.programs.run(
            _extend, self.weights, tokens, self.cache, jnp.asarray(is_active), graph=self.graph,
            attend=self.decode_attend,
        )  # fmt: skip
        return logits

    def _prefill(self, prompt: Any) -> tuple[Float[Array, " vocab"], AnyCache]:
        """Process a prompt in one piece; return its last logits, and a cache of one row."""
        tokens = np.zeros((1, padded_length(len(prompt), self.model.config.context)), np.int32)
        tokens[0, : len(prompt)] = prompt
        lengths = jnp.array([len(prompt)], jnp.int32)
        return self.programs.run(
            _prefill, self.weights, jnp.asarray(tokens), lengths, graph=self.graph,
            attend=self.attend, capacity=self._prefill_capacity(tokens.shape[1]),
        )  # fmt: skip

    def _prefill_capacity(self, tokens: int) -> int:
        return self.capacity


class PagedBatch(Batch):
    """Rows over a pool of pages, which go back to it when a row is released."""

    def _empty_cache(self) -> KVCache:
        # Tokens of a draft may go beyond the last token of a row.
        self._num_spare = 0 if self.draft is None else self.draft.num_tokens
        cache = self.model.empty_cache(self.rows, capacity=self.capacity + self._num_spare)
        sparse = self.decode_attend if self.draft is None else self.draft.attend
        cache = cache.with_selector(getattr(sparse, "page_selector", None))
        self._allocator = PageAllocator(cache.pages.num_pages, cache.pages.page_size)
        self._sequences = [-1] * self.rows
        return dataclasses.replace(cache, page_table=jnp.full_like(cache.page_table, -1))

    def admit(self, row, prompt, new_tokens):
        """See `Batch`."""
        sequence = self._sequences[row] = self._allocator.add()
        self._allocator.append(sequence, len(prompt) + new_tokens + self._num_spare)
        table = self._allocator.table([sequence], self.cache.page_table.shape[1])
        one = KVCache(self.cache.pages, jnp.asarray(table), jnp.zeros(1, jnp.int32))
        if getattr(self.attend, "is_chunkable", False):
            prefill = Prefill(
                self.model, one, len(prompt), attend=self.attend, programs=self.programs
            )
            prefill.add(prompt)
            logits, one = prefill.finish()
        else:
            logits, whole = self._prefill(prompt)
            one = self.programs.run(_copy_pages, one, whole)
        if self.cache.selector is not None:
            one = self.programs.run(
                _summarize, one, self.cache.summaries, selector=self.cache.selector
            )
        self.cache = dataclasses.replace(
            self.cache,
            pages=one.pages,
            page_table=self.cache.page_table.at[row].set(table[0]),
            lengths=self.cache.lengths.at[row].set(len(prompt)),
            summaries=one.summaries,
        )
        return logits

    def _prefill_capacity(self, tokens: int) -> int:
        return tokens

    def release(self, row):
        """See `Batch`."""
        self._allocator.free(self._sequences[row])
        self.cache = dataclasses.replace(
            self.cache,
            page_table=self.cache.page_table.at[row].set(-1),
            lengths=self.cache.lengths.at[row].set(0),
        )


class NativeBatch(Batch):
    """Rows of a model with native sparse attention, each with arrays of its own."""

    def _empty_cache(self) -> AnyCache:
        if self.draft is not None:
            raise ArgumentError(
                "native-draft", "a model with native sparse attention cannot draft",
                got=f"draft with {type(self.draft.attend).__name__}", expected="draft=None",
                fix="a step of such a model reads few tokens already",
            )  # fmt: skip
        token, length = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
        prefill = functools.partial(self.model.prefill, capacity=self.capacity)
        _, one = jax.eval_shape(prefill, token, length)
        grow = lambda x: jnp.zeros((x.shape[0], self.rows, *x.shape[2:]), x.dtype)
        layers = jax.tree.map(grow, one.layers)
        return dataclasses.replace(one, layers=layers, lengths=jnp.zeros(self.rows, jnp.int32))

    def admit(self, row, prompt, new_tokens):
        """See `Batch`."""
        logits, one = self._prefill(prompt)
        self.cache = self.programs.run(_set_row, self.cache, one, jnp.int32(row))
        return logits

    def release(self, row):
        """See `Batch`."""


@functools.partial(jax.jit, static_argnames=("graph", "attend", "capacity"))
def _prefill(
    weights, tokens: Int[Array, "1 T"], lengths: Int[Array, "1"], *, graph, attend, capacity: int
) -> tuple[Float[Array, " vocab"], AnyCache]:
    """Return the logits after the last token of a prompt, and its cache."""
    model = nnx.merge(graph, weights)
    hidden, cache = model.prefill(tokens, lengths, capacity=capacity, attend=attend)
    return model.logits(hidden[0, lengths[0] - 1]), cache


@functools.partial(jax.jit, donate_argnames=("cache",))
def _copy_pages(cache: KVCache, other: KVCache) -> KVCache:
    """Return a cache of one row with the tokens of another one."""
    table = cache.page_table[0, : other.page_table.shape[1]]
    table = jnp.where(table < 0, cache.pages.num_pages, table)
    copy = lambda x, new: x.at[:, table].set(new[:, : table.shape[0]], mode="drop")
    pages = jax.tree.map(copy, cache.pages, other.pages)
    return dataclasses.replace(cache, pages=pages, lengths=other.lengths)


@functools.partial(jax.jit, static_argnames=("selector",), donate_argnames=("cache", "summaries"))
def _summarize(cache: KVCache, summaries: Any, *, selector: PageSelector) -> KVCache:
    return cache.construct_summaries(selector, summaries)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _set_row(cache: Any, one: Any, row: Int[Array, ""]) -> Any:
    """Return a cache with one row replaced."""
    layers = jax.tree.map(lambda x, new: x.at[:, row].set(new[:, 0]), cache.layers, one.layers)
    return dataclasses.replace(
        cache, layers=layers, lengths=cache.lengths.at[row].set(one.lengths[0])
    )


@functools.partial(jax.jit, static_argnames=("graph", "attend"), donate_argnames=("cache",))
def _extend(
    weights,
    tokens: Int[Array, " B"],
    cache: AnyCache,
    is_active: Bool[Array, " B"],
    *,
    graph,
    attend,
) -> tuple[Float[Array, "B vocab"], AnyCache]:
    """Append a token to each active row; return logits and cache."""
    model = nnx.merge(graph, weights)
    hidden, extended = model.extend(tokens[:, None], cache, attend=attend)
    lengths = jnp.where(is_active, extended.lengths, cache.lengths)
    return model.logits(hidden[:, 0]), dataclasses.replace(extended, lengths=lengths)
