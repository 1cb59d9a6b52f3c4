"""The state of a training run, all that the next step depends on, and what model it belongs to."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jaxtyping import Array

from xsake.model import Decoder
from xsake.training.config import TrainingConfig
from xsake.training.guard import first_guard
from xsake.training.optimizer import Optimizer, make_optimizer, nested

Parameters = dict[str, Any]
"""float32 arrays in dictionaries inside each other; the keys on the way to one are its path."""

Place = Callable[[str, tuple[str, ...], tuple[int, ...]], Sharding]
"""From a parameter's path, the logical names of its axes and its shape to where it lies."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that the next step depends on, as a pytree of arrays.

    Args:
        step: int32, batches that were read; skipped updates count.
        parameters: float32, as `Definition.parameters` gives them.
        optimizer: state of `Optimizer.transform`.
        key: uint32, data of the run's random key; see `step_key`.
        guard: what `xsake.training.guard` remembers.
    """

    step: Any
    parameters: Any
    optimizer: Any
    key: Any
    guard: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """A decoder without its parameters.

    Args:
        graph: what it is made of.
        template: its parameters' shapes and names, without values.
    """

    graph: Any
    template: Any

    @classmethod
    def of(cls, model: Decoder) -> "Definition":
        """What a model is, with or without values."""
        graph, state = nnx.split(model)
        return cls(graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Logical names of the axes of every parameter, by path."""
        return {
            ".".join(map(str, path)): tuple(variable.get_metadata("out_sharding"))
            for path, variable in nnx.to_flat_state(self.template)
        }

    def parameters(self, model: Decoder) -> Parameters:
        """Copies of a model's weights in float32: steps give their own arrays away."""
        weights = nnx.to_pure_dict(nnx.split(model)[1])
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), weights)

    def merge(self, parameters: Parameters) -> Decoder:
        """The model with these parameters."""

        def filled(path, variable):
            value = parameters
            for part in path:
                value = value[part]
            return variable.replace(value)

        return nnx.merge(self.graph, nnx.map_state(filled, self.template))


@dataclasses.dataclass(frozen=True, eq=False)
class Shardings:
    """Where everything lies that a step is given.

    Args:
        state: a `TrainState` of shardings.
        tokens: of the batch.
    """

    state: TrainState
    tokens: Sharding


def make_model(config: TrainingConfig, key: Array) -> Decoder:
    """The decoder of a run with its first weights, drawn from `key`."""
    return Decoder(
        config.model.decoder,
        rngs=nnx.Rngs(params=key),
        compute_dtype=config.model.compute,
        param_dtype=jnp.float32,
        is_rematerialised=config.model.is_rematerialised,
    )


def define(config: TrainingConfig) -> Definition:
    """The decoder of a run without weights; nothing is computed."""
    return Definition.of(nnx.eval_shape(lambda: make_model(config, jax.random.key(0))))


def optimizer_of(config: TrainingConfig, definition: Definition) -> Optimizer:
    """The optimizer of a run."""
    return make_optimizer(config.optimizer, definition.names, total_steps=config.total_steps)


def make_state(config: TrainingConfig, model: Decoder, key: Array) -> TrainState:
    """The state before the first step.

    Args:
        config: of the run.
        model: the first weights; they are copied.
        key: for whatever a step draws.
    """
    definition = Definition.of(model)
    parameters = definition.parameters(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        parameters=parameters,
        optimizer=optimizer_of(config, definition).transform.init(parameters),
        key=jax.random.key_data(key),
        guard=first_guard(config.guard),
    )


def first_state(config: TrainingConfig) -> TrainState:
    """The state before the first step, all from `run.seed`.

    Under `jax.jit` with `out_shardings` no device ever holds more than its part of it.
    """
    weights, draws = jax.random.split(jax.random.key(config.run.seed))
    return make_state(config, make_model(config, weights), draws)


def abstract_state(config: TrainingConfig) -> TrainState:
    """Shapes and dtypes of a run's state; nothing is computed."""
    return jax.eval_shape(lambda: first_state(config))


def state_shardings(config: TrainingConfig, place: Place, everywhere: Sharding) -> TrainState:
    """Where the state of a run lies: moments beside their parameters, the rest on every device.

    Args:
        config: of the run.
        place: tells it for a parameter.
        everywhere: a sharding that repeats an array on every device.
    """
    definition, state = define(config), abstract_state(config)
    shapes = flat_parameters(state.parameters)
    placed = nested({
        path: place(path, names, tuple(shapes[path].shape))
        for path, names in definition.names.items()
    })  # fmt: skip
    transform = optimizer_of(config, definition).transform
    optimizer = optax.tree.map_params(
        transform.init, lambda _, own: own, state.optimizer, placed,
        transform_non_params=lambda _: everywhere,
    )  # fmt: skip
    rest = jax.tree.map(lambda _: everywhere, state)
    return dataclasses.replace(rest, parameters=placed, optimizer=optimizer)


def flat_parameters(parameters: Parameters) -> dict[str, Any]:
    """Parameters by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def step_key(state: TrainState) -> Array:
    """The random key of the step that comes next: the run's key, folded by the step."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)


def digest(tree: Any) -> str:
    """SHA-256 over the paths, types, shapes and bytes of all leaves: equal only bit for bit.

    Where several processes hold parts of an array, all of them must call it.

    Example:
        >>> digest({"a": np.float32(0.0)}) == digest({"a": np.float32(-0.0)})
        False
    """
    total = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            leaf = multihost_utils.process_allgather(leaf, tiled=True)
        array = np.asarray(leaf)
        total.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\0".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()
