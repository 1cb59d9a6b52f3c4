"""Lets a decoder read while somebody watches its layers, on one device or a document on each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from xsake.model.attend import Attend, Dense
from xsake.model.decoder import Decoder

CHUNK = 256  # tokens whose logits exist at once
_WEIGHTS, _BATCH, _BY_LAYER = PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data")


@dataclasses.dataclass(frozen=True, eq=False)
class Tapped:
    """Attention whose output goes through `tap(out, q, k, v, call, zeros)`."""

    attend: Attend
    tap: Callable[..., Any]
    zeros: Any

    def __call__(self, q, k, v, call):
        return self.tap(self.attend(q, k, v, call), q, k, v, call, self.zeros)


class Observer:
    """`observer(tokens, watch)`: what `watch` made of each layer, stacked over the layers.

    Every new `watch` is compiled once; the weights are arguments of what is compiled.

    Args:
        model: the decoder.
        devices: the batch is cut over them, so that each reads its own documents.
        attend: how layers look at each other.
    """

    def __init__(
        self,
        model: Decoder,
        *,
        devices: Sequence[jax.Device] | None = None,
        attend: Attend = Dense(),  # noqa: B008 (frozen)
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
            self._compiled[watch] = self._shared(run, (_WEIGHTS, _BATCH))
        return self._compiled[watch](self._weights, tokens)

    def slopes(
        self, tokens: Int[Array, "B T"], seeds: Int[Array, " B"], tap: Callable, zeros: Any
    ) -> Any:
        """The gradient by `zeros` of the log-probability of tokens that the model itself draws.

        Args:
            tokens: that the model reads; after each of them it draws one.
            seeds: of the draws, one for each document.
            tap: `tap(out, q, k, v, call, zeros)`, what layers go on with instead of `out`.
            zeros: [layers, B, ...] arrays.
        """

        def log_probability(zeros, weights, tokens, seeds):
            model = nnx.merge(self._graph, weights)
            model.is_rematerialised = True  # memory: the activations of one layer, not of all
            hidden = model.hidden(tokens, attend=Tapped(self._attend, tap, zeros))
            return jax.vmap(lambda x, seed: _drawn(model, x, seed))(hidden, seeds).sum()

        def run(weights, tokens, seeds, zeros):
            return jax.grad(log_probability)(zeros, weights, tokens, seeds)

        if tap not in self._compiled:
            self._compiled[tap] = self._shared(run, (_WEIGHTS, _BATCH, _BATCH, _BY_LAYER))
        return self._compiled[tap](self._weights, tokens, seeds, zeros)

    def _shared(self, run: Callable, specs: tuple[PartitionSpec, ...]) -> Callable:
        """Compiled; each device runs its own documents."""
        if self._devices is None:
            return jax.jit(run)
        mesh = Mesh(self._devices, ("data",))
        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_BY_LAYER, check_vma=False)
        )


def _drawn(model: Decoder, hidden: Float[Array, "T width"], seed) -> Float[Array, ""]:
    """Log-probability of tokens drawn from the logits of hidden states, some at a time."""
    chunks = -(-hidden.shape[0] // CHUNK)
    short = chunks * CHUNK - hidden.shape[0]
    parts = jnp.pad(hidden, ((0, short), (0, 0))).reshape(chunks, CHUNK, -1)
    is_there = jnp.arange(chunks * CHUNK).reshape(chunks, CHUNK) < hidden.shape[0]

    @jax.checkpoint
    def of_part(part):
        hidden, key, is_there = part
        logits = model.logits(hidden)
        drawn = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        found = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[:, None], axis=-1)[:, 0]
        return jnp.where(is_there, found, 0).sum()

    keys = jax.random.split(jax.random.key(seed), chunks)
    return jax.lax.map(of_part, (parts, keys, is_there)).sum()
