"""Prefill of a prompt in chunks of any size, with the same bits for all of them."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from xsake.attention.layer_call import AttentionFn
from xsake.errors import ArgumentError
from xsake.model.attend import DenseAttention
from xsake.model.cache import KVCache
from xsake.model.decoder import Decoder

TILE = 2048
MIN_TILE = 64


class CompiledPrograms:
    """Runs jitted programs; `clock` excludes their compilation."""

    def __init__(self):
        self._compiled: dict[Any, Any] = {}
        self.compile_seconds = 0.0

    def clock(self) -> float:
        """Return a time in seconds that excludes compilation."""
        return time.perf_counter() - self.compile_seconds

    def run(self, program: Any, *arguments: Any, **static: Any) -> Any:
        """Run `program`, compiled once for each set of shapes and static arguments."""
        leaves, tree = jax.tree.flatten(arguments)
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        key = program, shapes, tree, tuple(static.items())
        if key not in self._compiled:
            started = time.perf_counter()
            # jit caches the compiled program for later generations.
            self._compiled[key] = program.lower(*arguments, **static).compile()
            self.compile_seconds += time.perf_counter() - started
        return self._compiled[key](*arguments)


class Prefill:
    """Prefill of one prompt whose tokens arrive in chunks.

    Tokens are computed in tiles, each as soon as it is complete, so results do not depend on the
    chunks: caches and logits have the same bits. A tile attends to the pages of those before it.

    Args:
        model: a decoder without native sparse attention.
        cache: with one empty row, and space for the prompt.
        num_tokens: length of the prompt.
        attend: attention function with `is_chunkable`.
        tile: tokens; a multiple of the block size of a plan.
        programs: compiled programs to share; None: own ones.

    Example:
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> from xsake.model.prefill import Prefill
        >>> model = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
        >>> prefill = Prefill(model, model.empty_cache(1, capacity=64), num_tokens=5)
        >>> prefill.add([1, 2, 3])
        >>> prefill.add([4, 5])
        >>> logits, cache = prefill.finish()
        >>> logits.shape == (model.config.vocab_size,), cache.lengths.tolist()
        (True, [5])
    """

    def __init__(
        self,
        model: Decoder,
        cache: KVCache,
        num_tokens: int,
        *,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
        tile: int = TILE,
        programs: CompiledPrograms | None = None,
    ):
        if not getattr(attend, "is_chunkable", False):
            raise ArgumentError(
                "prefill-attend", "the attention function needs the whole prompt at once",
                got=type(attend).__name__, expected="an attention function with `is_chunkable`",
                fix="model.prefill(tokens, lengths, capacity=..., attend=attend)",
            )  # fmt: skip
        self._graph, self._weights = nnx.split(model)
        self._programs = programs or CompiledPrograms()
        self._attend, self._tile, self._num_tokens = attend, tile, num_tokens
        self._pending = np.zeros(0, np.int32)
        self._hidden: Any = None
        init = getattr(attend, "init_prefill", None)
        if init is not None:
            state = init([num_tokens], cache.capacity, model.compute_dtype)
            _check_tile(tile, state.block)
            cache = dataclasses.replace(cache, prefill=state)
        self._cache = cache
        self._added = 0

    def add(self, tokens: Any) -> None:
        """Add the next tokens of the prompt."""
        tokens = np.asarray(tokens, np.int32)
        self._added += len(tokens)
        if self._added > self._num_tokens:
            raise ArgumentError(
                "prefill-too-long", "the prompt has more tokens than announced", got=self._added,
                expected=f"{self._num_tokens} in all chunks together",
            )  # fmt: skip
        self._pending = np.concatenate([self._pending, tokens])
        while len(self._pending) >= self._tile:
            self._compute(self._pending[: self._tile], self._tile)
            self._pending = self._pending[self._tile :]

    def finish(self) -> tuple[Float[Array, " vocab"], KVCache]:
        """Compute the remaining tokens; return the logits after the last one, and the cache."""
        if self._added != self._num_tokens or self._added == 0:
            raise ArgumentError(
                "prefill-incomplete", "the prompt has fewer tokens than announced", got=self._added,
                expected=self._num_tokens, fix="add the missing chunks",
            )  # fmt: skip
        if len(self._pending):
            self._compute(self._pending, self._last_tile(len(self._pending)))
        logits = self._programs.run(_head, self._weights, self._hidden, graph=self._graph)
        return logits[0], dataclasses.replace(self._cache, prefill=None)

    def _last_tile(self, tokens: int) -> int:
        """Return one of few sizes that hold the last tokens."""
        return min(self._tile, max(MIN_TILE, 2 ** (tokens - 1).bit_length()))

    def _compute(self, tokens: Int[np.ndarray, " n"], size: int) -> None:
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        count = jnp.array([len(tokens)], jnp.int32)
        self._hidden, self._cache = self._programs.run(
            _extend_by_tile, self._weights, jnp.asarray(padded), count, self._cache,
            graph=self._graph, attend=self._attend,
        )  # fmt: skip


def _check_tile(tile: int, block: int) -> None:
    if tile % block:
        raise ArgumentError(
            "prefill-tile", "a tile must consist of whole blocks of the plan", got=tile,
            expected=f"a multiple of {block}",
        )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("graph", "attend"), donate_argnames=("cache",))
def _extend_by_tile(
    weights, tokens: Int[Array, "B T"], count: Int[Array, " B"], cache: KVCache, *, graph, attend
) -> tuple[Float[Array, "B width"], KVCache]:
    """Append a tile; return the hidden state of its last token, and the cache."""
    model = nnx.merge(graph, weights)
    hidden, cache = model.extend(tokens, cache, attend=attend, count=count)
    return hidden[jnp.arange(tokens.shape[0]), count - 1], cache


@functools.partial(jax.jit, static_argnames=("graph",))
def _head(weights, hidden: Float[Array, "B width"], *, graph) -> Float[Array, "B vocab"]:
    return nnx.merge(graph, weights).logits(hidden)
