"""The decoder: tokens in, logits out, layers scanned; which attention it runs is its caller's."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from xsake.attention import Branches
from xsake.errors import ArgumentError
from xsake.kernels.arguments import is_known
from xsake.model.attend import Attend, Dense, LayerCall, require_dense
from xsake.model.cache import AnyCache, Cache
from xsake.model.config import DecoderConfig
from xsake.model.layers import Attention, Layer, Norm, parameter
from xsake.model.native_cache import NativeCache
from xsake.model.native_sparse import NativeSparse
from xsake.model.rope import rotate, turns

Tokens = Int[Array | np.ndarray, "B T"]


_Look = Callable[[Array, Array, Array, LayerCall, Any], tuple[Array, tuple[Any, Any]]]
"""From rotated q and k, v, the layer's call and the cache to (seen, (cache, what to keep))."""


class Decoder(nnx.Module):
    """A decoder-only language model of the Llama or the GPT-2 family.

    Args:
        config: what it is made of.
        rngs: draws the weights; loading a checkpoint replaces them.
        compute_dtype: of activations; norms, softmax and logits are float32 whatever it is.
        param_dtype: of the weights.
        is_rematerialised: whether gradients compute a layer's inside again, not keep it.

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
        is_rematerialised: bool = False,
    ):
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.is_rematerialised = is_rematerialised
        vocab, width = config.vocab_size, config.width
        draw = functools.partial(parameter, rngs, dtype=param_dtype)
        self.embedding = draw(("vocab", "embed"), (vocab, width), fan_in=width)
        self.positions = (
            draw(("position", "embed"), (config.context, width), fan_in=width)
            if config.has_learned_positions
            else None
        )
        self.layers = _stacked_layers(config, rngs, param_dtype)
        self.final_norm = Norm(config, width, "embed", param_dtype)
        self.head = (
            None if config.is_tied else draw(("embed", "vocab"), (width, vocab), fan_in=width)
        )

    def __call__(
        self,
        tokens: Tokens,
        *,
        attend: Attend = Dense(),  # noqa: B008 (frozen)
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T vocab"]:
        """Logits of the token after each token.

        Args:
            tokens: [B, T] ids of the vocabulary. Others raise, and so do positions beyond the
                `context` of a model with learned positions; while traced, they make logits NaN.
            attend: how layers look at each other; the model's own mask holds in any case.
            positions: of the tokens, for embeddings and causality; None: 0, 1, 2...
            segment_ids: tokens of different ids do not see each other; negative ids see nothing.

        Returns:
            float32 [B, T, vocab].
        """
        hidden = self.hidden(tokens, attend=attend, positions=positions, segment_ids=segment_ids)
        return self.logits(hidden)

    def hidden(
        self,
        tokens: Tokens,
        *,
        attend: Attend = Dense(),  # noqa: B008 (frozen)
        positions: Int[Array, "B T"] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T width"]:
        """The last layer's output after the final norm: `logits` without the largest product."""
        tokens = jnp.asarray(tokens)
        rules = {"q_positions": positions, "kv_positions": positions, "segment_ids": segment_ids}

        def look(q, k, v, call: LayerCall, cache):
            return attend(q, k, v, dataclasses.replace(call, **rules)), (cache, None)

        return self._run(tokens, positions, attend, look)[0]

    def observe(
        self,
        tokens: Tokens,
        watch: Callable[[Array, Array, Array, LayerCall], Any],
        *,
        attend: Attend = Dense(),  # noqa: B008 (frozen)
    ) -> Any:
        """Read tokens, and return what `watch(q, k, v, call)` made of each layer, stacked.

        Args:
            tokens: [B, T] ids.
            watch: from a layer's rotated queries and keys, its values and its call to arrays.
            attend: how layers look at each other.
        """

        def look(q, k, v, call: LayerCall, cache):
            return attend(q, k, v, call), (cache, watch(q, k, v, call))

        return self._run(jnp.asarray(tokens), None, attend, look)[2]

    def logits(self, hidden: Float[Array, "*rest width"]) -> Float[Array, "*rest vocab"]:
        """float32 logits of hidden states."""
        # The embedding is read as it lies: transposing it first triples the time of a float32 step
        # on a CPU (49152 x 576: 56 ms against 18).
        if self.head is None:
            weight, axes = self.embedding[...], "...e,ve->...v"
        else:
            weight, axes = self.head[...], "...e,ev->...v"
        weight = weight.astype(hidden.dtype)
        found = jnp.einsum(axes, hidden, weight, preferred_element_type=jnp.float32)
        cap = self.config.logit_softcap
        return found if cap is None else cap * jnp.tanh(found / cap)

    def prefill(
        self,
        tokens: Tokens,
        lengths: Int[Array | np.ndarray, " B"],
        *,
        room: int,
        attend: Attend = Dense(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T width"], AnyCache]:
        """Read prompts: hidden states of every token, and a cache to go on from.

        Args:
            tokens: [B, T], each prompt at the start of its row; what follows it is padding.
            lengths: tokens of each prompt, at least 1.
            room: tokens that the cache can hold, at least T.
            attend: how layers look at each other.
        """
        tokens = jnp.asarray(tokens)

        def look(q, k, v, call: LayerCall, cache):
            # Padding comes after the prompt, so causality hides it from the prompt's tokens.
            kept = (k, v) if call.native is None else call.native.kept(k, v, lengths, room)
            return attend(q, k, v, call), (cache, kept)

        lengths = jnp.asarray(lengths)
        hidden, _, kept = self._run(tokens, None, attend, look)
        if self.config.native_sparse is not None:
            return hidden, NativeCache(kept, lengths.astype(jnp.int32))
        keys, values = kept
        return hidden, Cache.holding(keys, values, lengths, room)

    def extend(
        self,
        tokens: Tokens,
        cache: AnyCache,
        *,
        attend: Attend = Dense(),  # noqa: B008 (frozen)
    ) -> tuple[Float[Array, "B T width"], AnyCache]:
        """Read more tokens, each row from where its cache ends; T = 1 is a decode step.

        Args:
            tokens: [B, T].
            cache: from `prefill` or `extend`; it must have room for T more.
            attend: how layers look at each other.
        """
        tokens = jnp.asarray(tokens)
        if isinstance(cache, NativeCache):
            return self._extend_native(tokens, cache, attend)
        positions = cache.lengths[:, None] + _counted(tokens)
        rules = {"q_positions": positions, "kv_positions": cache.positions}

        def look(q, k, v, call: LayerCall, cache: Cache):
            cache = cache.with_layer(call.layer, positions, k, v)
            known = cache.of_layer(call.layer)
            return attend(q, *known, dataclasses.replace(call, **rules)), (cache, None)

        hidden, longer, _ = self._run(tokens, positions, attend, look, cache)
        return hidden, longer.longer_by(tokens.shape[1])

    def _extend_native(self, tokens, cache: NativeCache, attend: Attend):
        """As `extend`, token by token: each may complete a summary that the next one sees."""
        require_dense(attend)

        def look(q, k, v, call: LayerCall, cache: NativeCache):
            assert call.native is not None
            state, at = cache.of_layer(call.layer), cache.lengths
            seen, state = call.native.step(q, k, v, state, at, scale=call.scale)
            return seen, (cache.with_layer(call.layer, state), None)

        def one(cache, token):
            at = cache.lengths[:, None]
            hidden, longer, _ = self._run(token[:, None], at, attend, look, cache)
            return longer.longer_by(1), hidden[:, 0]

        longer, hidden = jax.lax.scan(one, cache, tokens.T)
        return jnp.moveaxis(hidden, 0, 1), longer

    def _run(self, tokens, positions, attend: Attend, look: _Look, cache: Any = None):
        """Embedding, all layers, final norm: (hidden, cache, what `look` kept, by layer)."""
        config = self.config
        _check_range("token ids", tokens, config.vocab_size, "the vocabulary")
        if self.positions is not None:
            given = np.arange(tokens.shape[1]) if positions is None else positions
            _check_range("positions", given, config.context, "the learned positions")
        positions = _counted(tokens) if positions is None else positions
        angles = turns(tuple(kind.rope for kind in config.kinds), config.head_dim, positions)
        graph, weights = nnx.split(self.layers)

        def step(carry, item):
            x, cache = carry
            weights, number, kind = item

            def look_rotated(q, k, v, native=None):
                if native is not None:
                    layer, gates = native
                    native = layer.native(gates, functools.partial(self._turned, kind))
                if any(kind.rope for kind in config.kinds):
                    q, k = rotate(q, angles[kind]), _rotated_keys(k, angles[kind])
                return _by_kind(config, kind, (number, native), look, (q, k, v, cache))

            x, (cache, kept) = nnx.merge(graph, weights)(x, look_rotated)
            return (x, cache), kept

        if self.is_rematerialised:
            step = jax.checkpoint(step)
        kinds = np.asarray(config.layer_kinds, np.int32)
        start = (self._embedded(tokens, positions), cache)
        if getattr(attend, "needs_layer_number", False):
            (x, cache), kept = _unrolled(step, start, weights, kinds.tolist())
        else:
            layers = (weights, jnp.arange(config.layers), kinds)
            (x, cache), kept = jax.lax.scan(step, start, layers)
        return self.final_norm(x), cache, kept

    def _turned(self, kind, x, positions):
        """Summaries of keys, rotated by the positions of their first tokens."""
        kinds = self.config.kinds
        if not any(kind.rope for kind in kinds):
            return x
        ropes = tuple(kind.rope for kind in kinds)
        return rotate(x, turns(ropes, self.config.head_dim, positions)[kind])

    def _embedded(self, tokens, positions):
        x = _take(self.embedding[...], tokens, self.compute_dtype)
        x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        if self.positions is not None:
            learned = _take(self.positions[...], positions, x.dtype)
            x = x + jnp.broadcast_to(learned, x.shape)
        return x


def _stacked_layers(config: DecoderConfig, rngs: nnx.Rngs, dtype) -> Layer:
    """All layers as one, with a leading axis `layer` on every parameter."""
    attention = Attention if config.native_sparse is None else NativeSparse
    make = nnx.vmap(
        lambda rngs: Layer(config, rngs, dtype, attention),
        axis_size=config.layers,
        transform_metadata={nnx.PARTITION_NAME: "layer"},
    )
    return nnx.split_rngs(splits=config.layers)(make)(rngs)


def _check_range(name: str, values, size: int, what: str) -> None:
    """Refuse rows that a table does not have, where values are known; traced ones read NaN."""
    known = np.asarray(values) if is_known(values) else np.zeros(1, np.int32)
    if known.size and (known.min() < 0 or known.max() >= size):
        raise ArgumentError(
            f"{name} are outside {what}",
            got=f"{known.min()} to {known.max()}",
            expected=f"0 to {size - 1}",
            fix="tokenize with the vocabulary of this model, and read no more than its context",
        )


def _take(table, index, dtype) -> Array:
    """Rows of a table; NaN for a row that it does not have, a negative one included."""
    return jnp.take(table, jnp.where(index < 0, table.shape[0], index), axis=0).astype(dtype)


def _counted(tokens) -> Array:
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]


def _rotated_keys(k, angles):
    """Keys by position; those to be compressed wait until they are summaries."""
    if not isinstance(k, Branches):
        return rotate(k, angles)
    return Branches(k.compressed, rotate(k.selected, angles), rotate(k.window, angles))


def _by_kind(config: DecoderConfig, kind, known, look, arguments):
    """`look` under the rule of the layer's kind, which is known only at run time in a scan."""

    def branch(index: int):
        mask, cap = config.kinds[index].mask, config.attention_softcap
        number, native = known
        call = LayerCall(layer=number, mask=mask, scale=config.scale, softcap=cap, native=native)
        return lambda q, k, v, cache: look(q, k, v, call, cache)

    if len(config.kinds) == 1 or isinstance(kind, int):
        return branch(0 if len(config.kinds) == 1 else kind)(*arguments)
    return jax.lax.switch(kind, [branch(i) for i in range(len(config.kinds))], *arguments)


def _unrolled(step, carry, weights, kinds: list[int]):
    """`lax.scan` over the layers as a Python loop, so that each knows its number."""
    kept = []
    for number, kind in enumerate(kinds):
        own = jax.tree.map(lambda x, number=number: x[number], weights)
        carry, found = step(carry, (own, number, kind))
        kept.append(found)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *kept)
