"""Run a decoder with per-layer hooks: whole, data-parallel, or one layer at a time."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from xsake.attention import BlockSparseAttention
from xsake.attention.layer_call import AttentionFn, LayerCall
from xsake.attention.types import Implementation
from xsake.model.attend import DenseAttention
from xsake.model.decoder import Decoder, layer_step
from xsake.model.sharding import default_rules
from xsake.sharding import named_sharding

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


class StreamingObserver:
    """An `Observer` for models that do not fit a device: it holds the weights of one layer.

    All weights stay in host memory; `grads` keeps the hidden states before every layer there, too.
    Results are those of `Observer` up to rounding.

    Args:
        model: the decoder; load it with `jax.default_device(jax.devices("cpu")[0])` if it does not
            fit the default device.
        mesh: with an axis "tensor", over which heads, MLP and vocabulary are sharded; None: the
            default device.
        implementation: of attention.
    """

    def __init__(
        self, model: Decoder, *, mesh: Mesh | None = None, implementation: Implementation = None
    ):
        self._config, self._mesh = model.config, mesh
        self._attend = DenseAttention(
            BlockSparseAttention(mesh=mesh, implementation=implementation)
        )
        self._layer_graph, layers = nnx.split(model.layers)
        graph, unused, ends = nnx.split(model, nnx.PathContains("layers"), ...)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), unused)
        self._with_ends = lambda ends: nnx.merge(graph, shapes, ends)  # embed and logits work
        self._layers, self.end_weights = (jax.tree.map(np.asarray, x) for x in (layers, ends))
        self._compiled: dict[Callable | str, Callable] = {}

    def __call__(self, tokens: Int[Array, "B T"], watch: Callable[..., Any]) -> Any:
        """Return the results of the hook `watch`, stacked over layers, in host memory."""
        found = []
        self._forward(tokens, watch, lambda x, aux: found.append(jax.device_get(aux)))
        return jax.tree.map(lambda *x: np.stack(x), *found)

    def grads(
        self, tokens: Int[Array, "B T"], seeds: Int[Array, " B"], tap: Callable, zeros: Any
    ) -> Any:
        """See `Observer.grads`."""
        inputs: list[np.ndarray] = []
        x = self._forward(tokens, _watch_nothing, lambda x, _: inputs.append(jax.device_get(x)))
        grad = self._jit("end", self.end_gradient)(_put(self.end_weights, self._mesh), x, seeds)
        step = self._jit(tap, functools.partial(self.layer_gradient, tap), kind=4)
        found = []
        for number in reversed(range(self._config.layers)):
            kind, weights = self._config.layer_kinds[number], self._layer(number)
            grad, of_layer = step(weights, inputs.pop(), grad, number, kind, zeros)
            found.append(jax.device_get(of_layer))
        return jax.tree.map(lambda *x: np.stack(x), *found[::-1])

    def _forward(self, tokens, watch: Callable, keep: Callable[[Array, Any], None]) -> Array:
        """Run all layers; pass the input and the results of the hook of each to `keep`."""
        embed = self._jit("start", lambda ends, tokens: self._with_ends(ends).embed(tokens))
        step = self._jit(watch, functools.partial(self.run_layer, watch), kind=3)
        x, weights = embed(_put(self.end_weights, self._mesh), tokens), self._layer(0)
        for number, kind in enumerate(self._config.layer_kinds):
            following, aux = step(weights, x, number, kind)
            if number + 1 < self._config.layers:
                weights = self._layer(number + 1)  # copied while the device computes
            keep(x, aux)
            x = following
        return x

    def run_layer(self, watch: Callable, weights: nnx.State, x: Array, number, kind: int):
        """Return the output of a layer and the results of the hook `watch`."""

        def attend(q, k, v, call: LayerCall, cache):
            return self._attend(q, k, v, call), (cache, watch(q, k, v, call))

        return self._run(attend, weights, x, number, kind)

    def layer_gradient(
        self, tap: Callable, weights: nnx.State, x: Array, grad: Array, number, kind: int, zeros
    ):
        """Return the gradient by the input of a layer, and by its part of `zeros`."""

        def run(x, zeros):
            def attend(q, k, v, call: LayerCall, cache):
                return tap(self._attend(q, k, v, call), q, k, v, call, zeros), (cache, None)

            return self._run(attend, weights, x, number, kind)[0]

        grad, of_zeros = jax.vjp(run, x, zeros)[1](grad)
        return grad, jax.tree.map(lambda x: x[number], of_zeros)

    def _run(self, attend: Callable, weights, x, number, kind: int):
        positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
        step = layer_step(self._config, self._layer_graph, positions, attend)
        (x, _), aux = step((x, None), (weights, number, kind))
        if self._mesh is not None:
            x = jax.lax.with_sharding_constraint(x, NamedSharding(self._mesh, PartitionSpec()))
        return x, aux

    def end_gradient(self, ends: nnx.State, x: Array, seeds: Int[Array, " B"]) -> Array:
        """Return the gradient of the log-probability of samples by the last layer's output."""

        def log_probability(x):
            model = self._with_ends(ends)
            hidden = model.final_norm(x)
            return jax.vmap(lambda x, seed: _sampled_log_prob(model, x, seed))(hidden, seeds).sum()

        return jax.grad(log_probability)(x)

    def layer_weights(self, number: int) -> nnx.State:
        """Return the weights of a layer, in host memory."""
        return jax.tree.map(lambda x: x[number], self._layers)

    def _layer(self, number: int) -> nnx.State:
        return _put(self.layer_weights(number), self._mesh)

    def _jit(self, key: Callable | str, run: Callable, *, kind: int | None = None) -> Callable:
        """Compile a function once; `kind` is the place of its static argument."""
        if key not in self._compiled:
            self._compiled[key] = jax.jit(run, static_argnums=() if kind is None else kind)
        return self._compiled[key]


def _watch_nothing(q, k, v, call) -> None:
    return None


def weight_shardings(variables: nnx.State, mesh: Mesh) -> Any:
    """Return the shardings of weights, of the whole model or of one layer."""
    rules = default_rules(mesh)

    def sharding(path: tuple, variable: nnx.Variable) -> NamedSharding:
        # Weights of one layer still have the name of the axis of layers.
        names = variable.get_metadata("out_sharding")[-len(variable.shape) :]
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return named_sharding(name, names, variable.shape, mesh, rules)

    is_variable = lambda x: isinstance(x, nnx.Variable)
    return jax.tree_util.tree_map_with_path(sharding, variables, is_leaf=is_variable)


def _put(variables: nnx.State, mesh: Mesh | None) -> nnx.State:
    """Copy weights to the default device or a mesh."""
    return jax.device_put(variables, None if mesh is None else weight_shardings(variables, mesh))


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
