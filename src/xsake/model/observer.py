"""Run a decoder with per-layer hooks, on one device or data-parallel."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from xsake.attention.layer_call import AttentionFn
from xsake.model.attend import DenseAttention
from xsake.model.decoder import Decoder

CHUNK = 256  # tokens per chunk of logits
_WEIGHTS, _BATCH, _BY_LAYER = PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data")


class Observer:
    """`observer(tokens, watch)` returns the results of the hook `watch`, stacked over layers.

    Every new `watch` is compiled once, with the weights as arguments.

    Args:
        model: the decoder.
        devices: data-parallel devices for the batch.
        attend: attention function.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        devices: Sequence[jax.Device] | None = None,
        attend: AttentionFn = DenseAttention(),  # noqa: B008 (frozen)
    ):
        self._graph, self._weights = nnx.split(model)
        self._devices = None if devices is None else tuple(devices)
        self._attend = attend
        self._compiled: dict[Callable, Callable] = {}

    def __call__(self, tokens: Int[Array, "B T"], watch: Callable[..., Any]) -> Any:
        def run(weights, tokens):
            model = nnx.merge(self._graph, weights)
            return model.observe(tokens, watch, attend=self._attend)

        if watch not in self._compiled:
            self._compiled[watch] = self._compile(run, (_WEIGHTS, _BATCH))
        return self._compiled[watch](self._weights, tokens)

    def grads(
        self, tokens: Int[Array, "B T"], seeds: Int[Array, " B"], tap: Callable, zeros: Any
    ) -> Any:
        """Return the gradient by `zeros` of the log-probability of tokens sampled from the model.

        Args:
            tokens: inputs; one token is sampled at each position.
            seeds: sampling seeds, one per document.
            tap: `tap(out, q, k, v, call, zeros)` replaces the attention output `out`.
            zeros: [layers, B, ...] perturbations.
        """

        def log_probability(zeros, weights, tokens, seeds):
            model = nnx.merge(self._graph, weights)
            model.remat = True  # keeps the activations of one layer only
            attend = lambda q, k, v, call: tap(self._attend(q, k, v, call), q, k, v, call, zeros)
            hidden = model.hidden(tokens, attend=attend)
            return jax.vmap(lambda x, seed: _sampled_log_prob(model, x, seed))(hidden, seeds).sum()

        def run(weights, tokens, seeds, zeros):
            return jax.grad(log_probability)(zeros, weights, tokens, seeds)

        if tap not in self._compiled:
            self._compiled[tap] = self._compile(run, (_WEIGHTS, _BATCH, _BATCH, _BY_LAYER))
        return self._compiled[tap](self._weights, tokens, seeds, zeros)

    def _compile(self, run: Callable, specs: tuple[PartitionSpec, ...]) -> Callable:
        """Compile a function; each device runs its share of the batch."""
        if self._devices is None:
            return jax.jit(run)
        mesh = Mesh(self._devices, ("data",))
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_BY_LAYER, check_vma=False)
        )


def _sampled_log_prob(model: Decoder, hidden: Float[Array, "T width"], seed) -> Float[Array, ""]:
    """Return the log-probability of tokens sampled from hidden states, computed in chunks."""
    chunks = -(-hidden.shape[0] // CHUNK)
    padding = chunks * CHUNK - hidden.shape[0]
    parts = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(chunks, CHUNK, -1)
    is_valid = jnp.arange(chunks * CHUNK).reshape(chunks, CHUNK) < hidden.shape[0]

    @jax.checkpoint
    def chunk_log_prob(part):
        hidden, key, is_valid = part
        logits = model.logits(hidden)
        sampled = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), sampled[:, None], axis=-1)[:, 0]
        return jnp.where(is_valid, log_probs, 0).sum()

    keys = jax.random.split(jax.random.key(seed), chunks)
    return jax.lax.map(chunk_log_prob, (parts, keys, is_valid)).sum()
