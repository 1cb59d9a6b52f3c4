"""Decoder-only transformer with scanned layers and a pluggable attention function."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from xsake import nsa
from xsake.attention.layer_call import AttentionFn, LayerCall, native_sparse_error
from xsake.errors import ArgumentError
from xsake.kernels.validation import is_known
from xsake.model.attend import DenseAttention
from xsake.model.cache import AnyCache, KVCache, NativeCache
from xsake.model.config import DecoderConfig, LayerKind
from xsake.model.indexed_layer import IndexedAttention, IndexedCall
from xsake.model.layers import Attention, Layer, Norm, cos_sin_tables, init_param, rotate
from xsake.model.nsa_layer import NativeSparse

Tokens = Int[Array | np.ndarray, "B T"]
_ROTATED = "selected", "window"  # branches of native sparse attention

LayerAttention = Callable[[Array, Array, Array, LayerCall, Any], tuple[Array, tuple[Any, Any]]]
"""Maps rotated q and k, v, the layer's call and the cache to (out, (cache, auxiliary output))."""


class Decoder(nnx.Module):
    """A decoder-only language model of the Llama or the GPT-2 family.

    Args:
        config: of the model.
        rngs: for the initial weights.
        compute_dtype: of activations; norms, softmax and logits are always float32.
        param_dtype: of the weights.
        remat: whether to rematerialize the activations of layers in the backward pass.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from xsake.model import Decoder, DecoderConfig
        >>> model = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
        >>> model(jnp.zeros((1, 10), jnp.int32)).shape
        (1, 10, 96)
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        compute_dtype=jnp.float32,
        param_dtype=jnp.float32,
        remat: bool = False,
    ):
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.remat = remat
        vocab, width = config.vocab_size, config.width
        draw = functools.partial(init_param, rngs, dtype=param_dtype)
        self.embedding = draw(("vocab", "embed"), (vocab, width), fan_in=width)
        self.positions = (
            draw(("position", "embed"), (config.context, width), fan_in=width)
            if config.has_learned_positions
            else None
        )
        self.layers = _make_layers(config, rngs, param_dtype)
        self.final_norm = Norm(config, width, "embed", param_dtype)
        self.head = (
            None if config.is_tied else draw(("embed", "vocab"), (width, vocab), fan_in=width)
        )

    def __call__(
        self,
        tokens: Tokens,
        *,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Return the logits of the next token at each position.

        Args:
            tokens: [B, T] token ids. Ids outside the vocabulary raise, and so do positions beyond
                the `context` of a model with learned positions; if traced, logits become NaN.
            attend: attention function; the model's mask always applies.
            positions: of the tokens, for embeddings and causality; None: 0, 1, 2...
            segment_ids: tokens attend only within their segment; negative ids attend to nothing.

        Returns:
            float32 [B, T, vocab].
        """
        hidden = self.hidden(tokens, attend=attend, positions=positions, segment_ids=segment_ids)
        return self.logits(hidden)

    def hidden(
        self,
        tokens: Tokens,
        *,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T width"]:
        """Return the output of the last layer after the final norm."""
        tokens = jnp.asarray(tokens)
        overrides = {
            "q_positions": positions,
            "kv_positions": positions,
            "segment_ids": segment_ids,
        }

        def layer_attention(q, k, v, call: LayerCall, cache):
            return attend(q, k, v, dataclasses.replace(call, **overrides)), (cache, None)

        return self._run(tokens, positions, attend, layer_attention)[0]

    def observe(
        self,
        tokens: Tokens,
        watch: Callable[[Array, Array, Array, LayerCall], Any],
        *,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
    ) -> Any:
        """Run the model and return the results of `watch(q, k, v, call)`, stacked over layers.

        Args:
            tokens: [B, T] ids.
            watch: hook, called with a layer's rotated q and k, v and its call; returns arrays.
            attend: attention function.
        """
        return self.hidden_and_observed(tokens, watch, attend=attend)[1]

    def hidden_and_observed(
        self,
        tokens: Tokens,
        watch: Callable[[Array, Array, Array, LayerCall], Any],
        *,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T width"], Any]:
        """Return what `hidden` and `observe` return, of one run."""

        def layer_attention(q, k, v, call: LayerCall, cache):
            return attend(q, k, v, call), (cache, watch(q, k, v, call))

        hidden, _, observed = self._run(jnp.asarray(tokens), None, attend, layer_attention)
        return hidden, observed

    def embed(
        self, tokens: Tokens, positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T width"]:
        """Return the input of the first layer; arguments as of `__call__`."""
        config = self.config
        _check_range("token ids", tokens, config.vocab_size, "the vocabulary")
        x = _gather_rows(self.embedding[...], tokens, self.compute_dtype)
        x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if self.positions is None:
            return x
        indices = np.arange(tokens.shape[1]) if positions is None else positions
        _check_range("positions", indices, config.context, "the learned positions")
        positions = _token_positions(tokens) if positions is None else positions
        learned = _gather_rows(self.positions[...], positions, x.dtype)
        return x + jnp.broadcast_to(learned, x.shape)

    def logits(self, hidden: Float[Array, "*rest width"]) -> Float[Array, "*rest vocab"]:
        """Return float32 logits of hidden states."""
        # No explicit transpose of the embedding: it triples the time of a float32 step on a CPU
        # (49152 x 576: 56 ms instead of 18 ms).
        if self.head is None:
            weight, axes = self.embedding[...], "...e,ve->...v"
        else:
            weight, axes = self.head[...], "...e,ev->...v"
        weight = weight.astype(hidden.dtype)
        logits = jnp.einsum(axes, hidden, weight, preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def empty_cache(self, rows: int, *, capacity: int) -> KVCache:
        """Return a paged cache without tokens: rows have pages of their own for `capacity` tokens.

        A model with native sparse attention has no paged cache.
        """
        config = self.config
        if config.native_sparse is not None:
            raise native_sparse_error("empty_cache(...)")
        return KVCache.empty(
            rows, capacity, layers=config.layers, kv_heads=config.kv_heads,
            head_dim=config.head_dim, dtype=self.compute_dtype,
            index_dim=None if config.indexer is None else config.indexer.dim,
        )  # fmt: skip

    def prefill(
        self,
        tokens: Tokens,
        lengths: Int[Array | np.ndarray, " B"],
        *,
        capacity: int,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T width"], AnyCache]:
        """Process prompts; return hidden states of every token and a cache for decoding.

        Args:
            tokens: [B, T], right-padded prompts.
            lengths: length of each prompt, at least 1.
            capacity: of the cache in tokens, at least T.
            attend: attention function.
        """
        tokens = jnp.asarray(tokens)

        def layer_attention(q, k, v, call: LayerCall, cache):
            # Padding follows the prompt, so the causal mask hides it.
            native, kv = call.native, (k, v, None)
            if isinstance(native, IndexedCall):
                kv = k, v, native.index_k
            elif native is not None:
                kv = native.make_state(k, v, lengths, capacity)
            return attend(q, k, v, call), (cache, kv)

        lengths = jnp.asarray(lengths)
        hidden, _, kv = self._run(tokens, None, attend, layer_attention)
        if self.config.native_sparse is not None:
            return hidden, NativeCache(kv, lengths.astype(jnp.int32))
        keys, values, index = kv
        return hidden, KVCache.from_prefill(keys, values, lengths, capacity, index=index)

    def extend(
        self,
        tokens: Tokens,
        cache: AnyCache,
        *,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
        count: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T width"], AnyCache]:
        """Append tokens to each row; T = 1 is a decode step.

        Args:
            tokens: [B, T].
            cache: from `prefill` or `extend`, with space for T more tokens.
            attend: attention function.
            count: tokens of each row that are appended, the others are padding; None: T.
        """
        tokens = jnp.asarray(tokens)
        if isinstance(cache, NativeCache):
            assert count is None, "padding of native sparse attention"
            return self._extend_native(tokens, cache, attend)
        positions = cache.lengths[:, None] + _token_positions(tokens)
        if count is not None:  # padding has the position of the last token
            positions = jnp.minimum(positions, (cache.lengths + count)[:, None] - 1)
        overrides = {"q_positions": positions, "kv_positions": cache.positions}

        def layer_attention(q, k, v, call: LayerCall, cache: KVCache):
            index = call.native.index_k if isinstance(call.native, IndexedCall) else None
            cache, pages = cache.append(call.layer, q, k, v, count, index)
            call = dataclasses.replace(call, pages=pages, **overrides)
            # The compiler drops the copy where attention reads the pages.
            return attend(q, *pages.gather(), call), (cache, None)

        hidden, cache, _ = self._run(tokens, positions, attend, layer_attention, cache)
        return hidden, cache.advance(tokens.shape[1] if count is None else count)

    def _extend_native(self, tokens, cache: NativeCache, attend: AttentionFn):
        """Extend token by token: each token may complete a summary that the next one attends to."""
        if not isinstance(attend, DenseAttention):
            raise native_sparse_error(f"attend={type(attend).__name__}(...)")

        def layer_attention(q, k, v, call: LayerCall, cache: NativeCache):
            assert call.native is not None
            state, position = cache.get_layer(call.layer), cache.lengths
            out, state = call.native.step(q, k, v, state, position, scale=call.scale)
            return out, (cache.set_layer(call.layer, state), None)

        def decode_step(cache, token):
            position = cache.lengths[:, None]
            hidden, cache, _ = self._run(token[:, None], position, attend, layer_attention, cache)
            return cache.advance(1), hidden[:, 0]

        cache, hidden = jax.lax.scan(decode_step, cache, tokens.T)
        return jnp.moveaxis(hidden, 0, 1), cache

    def _run(
        self, tokens, positions, attend: AttentionFn, layer_attention: LayerAttention,
        cache: Any = None,
    ):  # fmt: skip
        """Run embedding, layers and final norm; return (hidden, cache, auxiliary outputs)."""
        x = self.embed(tokens, positions)
        positions = _token_positions(tokens) if positions is None else positions
        graph, weights = nnx.split(self.layers)
        step = layer_step(self.config, graph, positions, layer_attention)
        if self.remat:
            step = jax.checkpoint(step)
        kinds, start = np.asarray(self.config.layer_kinds, np.int32), (x, cache)
        if getattr(attend, "needs_layer_number", False):
            (x, cache), aux = _unroll(step, start, weights, kinds.tolist())
        else:
            layers = (weights, jnp.arange(self.config.layers), kinds)
            (x, cache), aux = jax.lax.scan(step, start, layers)
        return self.final_norm(x), cache, aux


def layer_step(
    config: DecoderConfig, graph: nnx.GraphDef, positions: Int[Array, "#B T"],
    layer_attention: LayerAttention,
) -> Callable:  # fmt: skip
    """Return `step((x, cache), (weights, number, kind))` of one layer.

    It returns ((x, cache), auxiliary output). `kind` indexes `config.kinds`; it may be traced.

    Args:
        config: of the model.
        graph: of one layer, from `nnx.split`.
        positions: of the tokens.
        layer_attention: attention of a layer.
    """
    tables = _rope_tables(config, positions)

    def step(carry, item):
        x, cache = carry
        weights, number, kind = item

        def rotate_at(x, at=positions):
            return _rotate(x, _rope_tables(config, at, x.shape[-1]), kind)

        def rotate_and_attend(q, k, v, native=None):
            if native is not None:
                layer, gates = native
                native = layer.make_call(gates, rotate_at)
            q, k = _rotate(q, tables, kind), _rotate(k, tables, kind)

            def attend_by_kind(kind: LayerKind):
                call = LayerCall(
                    number, kind.mask, config.scale, config.attention_softcap, native=native
                )
                return lambda q, k, v, cache: layer_attention(q, k, v, call, cache)

            branches = [attend_by_kind(kind) for kind in config.kinds]
            return _switch(kind, branches, q, k, v, cache)

        x, (cache, aux) = nnx.merge(graph, weights)(x, rotate_and_attend)
        return (x, cache), aux

    return step


def _rope_tables(config: DecoderConfig, positions, dim: int | None = None) -> Array | None:
    """Return cosines and sines by kind of layer; None without rotary positions."""
    ropes = tuple(kind.rope for kind in config.kinds)
    return cos_sin_tables(ropes, dim or config.head_dim, positions) if any(ropes) else None


def _make_layers(config: DecoderConfig, rngs: nnx.Rngs, dtype) -> Layer:
    """Create all layers, stacked along a leading axis `layer` of every parameter."""
    attention = Attention if config.native_sparse is None else NativeSparse
    attention = attention if config.indexer is None else IndexedAttention
    make = nnx.vmap(
        lambda rngs: Layer(config, rngs, dtype, attention),
        axis_size=config.layers,
        transform_metadata={nnx.PARTITION_NAME: "layer"},
    )
    return nnx.split_rngs(splits=config.layers)(make)(rngs)


def _check_range(name: str, values, size: int, what: str) -> None:
    """Raise for out-of-range indices with static values; traced ones read NaN."""
    static = np.asarray(values) if is_known(values) else np.zeros(1, np.int32)
    if static.size and (static.min() < 0 or static.max() >= size):
        raise ArgumentError(
            "decoder-input", f"{name} are outside {what}", got=f"{static.min()} to {static.max()}",
            expected=f"0 to {size - 1}",
            fix="use the tokenizer of this model, and at most its context length",
        )  # fmt: skip


def _gather_rows(table, index, dtype) -> Array:
    """Gather rows of a table; out-of-range and negative indices read NaN."""
    return jnp.take(table, jnp.where(index < 0, table.shape[0], index), axis=0).astype(dtype)


def _token_positions(tokens) -> Array:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]


def _rotate(x, tables, kind):
    """Rotate queries or keys; those of the compressed branch are rotated after compression."""
    if tables is None:
        return x
    if isinstance(x, nsa.KV):
        return x._replace(**{name: rotate(getattr(x, name), tables[kind]) for name in _ROTATED})
    return rotate(x, tables[kind])


def _switch(kind, branches: list[Callable], *arguments):
    """Call the branch of a layer's kind, which is traced in a scan over different kinds."""
    if len(branches) == 1 or isinstance(kind, int):
        return branches[0 if len(branches) == 1 else kind](*arguments)
    return jax.lax.switch(kind, branches, *arguments)


def _unroll(step, carry, weights, kinds: list[int]):
    """Run `lax.scan` over the layers as a Python loop, so that layer numbers are static."""
    outputs = []
    for number, kind in enumerate(kinds):
        layer = jax.tree.map(lambda x, number=number: x[number], weights)
        carry, aux = step(carry, (layer, number, kind))
        outputs.append(aux)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)
