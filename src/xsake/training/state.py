"""Training state, and the definition of the model it belongs to."""

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
from xsake.training.guard import init_guard
from xsake.training.optimizer import Optimizer, make_optimizer, unflatten

Parameters = dict[str, Any]
"""Nested dictionaries of float32 arrays; the keys form the path of a parameter."""

ShardingRule = Callable[[str, tuple[str, ...], tuple[int, ...]], Sharding]
"""Maps a parameter's path, logical axis names and shape to its sharding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything the next step depends on, as a pytree of arrays.

    Args:
        step: int32, number of batches read; skipped updates count.
        parameters: float32, see `ModelDefinition.parameters`.
        optimizer: state of `Optimizer.transform`.
        key: uint32, data of the run's random key; see `step_key`.
        guard: state of the update filter.
    """

    step: Any
    parameters: Any
    optimizer: Any
    key: Any
    guard: Any


@dataclasses.dataclass(frozen=True, eq=False)
class ModelDefinition:
    """A decoder without its parameter values.

    Args:
        graph: nnx graph definition.
        template: shapes and names of the parameters.
    """

    graph: Any
    template: Any

    @classmethod
    def from_model(cls, model: Decoder) -> "ModelDefinition":
        """Split a model, concrete or abstract."""
        graph, state = nnx.split(model)
        return cls(graph, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state))

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Logical axis names of every parameter, by path."""
        return {
            ".".join(map(str, path)): tuple(variable.get_metadata("out_sharding"))
            for path, variable in nnx.to_flat_state(self.template)
        }

    def parameters(self, model: Decoder) -> Parameters:
        """Copy a model's weights in float32; steps donate their arrays."""
        weights = nnx.to_pure_dict(nnx.split(model)[1])
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32, copy=True), weights)

    def merge(self, parameters: Parameters) -> Decoder:
        """Return the model with these parameters."""

        def fill(path, variable):
            value = parameters
            for part in path:
                value = value[part]
            return variable.replace(value)

        return nnx.merge(self.graph, nnx.map_state(fill, self.template))


@dataclasses.dataclass(frozen=True, eq=False)
class Shardings:
    """Shardings of the arguments of a step.

    Args:
        state: a `TrainState` of shardings.
        tokens: of the batch.
    """

    state: TrainState
    tokens: Sharding


def make_model(config: TrainingConfig, key: Array) -> Decoder:
    """Build the decoder of a run with initial weights from `key`."""
    return Decoder(
        config.model.decoder,
        rngs=nnx.Rngs(params=key),
        compute_dtype=config.model.compute_dtype,
        param_dtype=jnp.float32,
        remat=config.model.remat,
    )


def define_model(config: TrainingConfig) -> ModelDefinition:
    """Return the decoder of a run without weights; nothing is computed."""
    return ModelDefinition.from_model(nnx.eval_shape(lambda: make_model(config, jax.random.key(0))))


def build_optimizer(config: TrainingConfig, definition: ModelDefinition) -> Optimizer:
    """Build the optimizer of a run."""
    return make_optimizer(config.optimizer, definition.names, total_steps=config.total_steps)


def make_state(config: TrainingConfig, model: Decoder, key: Array) -> TrainState:
    """Build the state before the first step.

    Args:
        config: of the run.
        model: initial weights; they are copied.
        key: for random numbers of steps.
    """
    definition = ModelDefinition.from_model(model)
    parameters = definition.parameters(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        parameters=parameters,
        optimizer=build_optimizer(config, definition).transform.init(parameters),
        key=jax.random.key_data(key),
        guard=init_guard(config.guard),
    )


def init_state(config: TrainingConfig) -> TrainState:
    """Build the state before the first step from `run.seed`.

    Under `jax.jit` with `out_shardings` each device holds only its shard.
    """
    weights, draws = jax.random.split(jax.random.key(config.run.seed))
    return make_state(config, make_model(config, weights), draws)


def abstract_state(config: TrainingConfig) -> TrainState:
    """Return shapes and dtypes of a run's state; nothing is computed."""
    return jax.eval_shape(lambda: init_state(config))


def state_shardings(
    config: TrainingConfig, sharding_rule: ShardingRule, replicated: Sharding
) -> TrainState:
    """Return the shardings of a run's state: moments as their parameters, the rest replicated.

    Args:
        config: of the run.
        sharding_rule: sharding of a parameter.
        replicated: sharding of everything else.
    """
    definition, state = define_model(config), abstract_state(config)
    shapes = flat_parameters(state.parameters)
    shardings = unflatten({
        path: sharding_rule(path, names, tuple(shapes[path].shape))
        for path, names in definition.names.items()
    })  # fmt: skip
    transform = build_optimizer(config, definition).transform
    optimizer = optax.tree.map_params(
        transform.init, lambda _, sharding: sharding, state.optimizer, shardings,
        transform_non_params=lambda _: replicated,
    )  # fmt: skip
    rest = jax.tree.map(lambda _: replicated, state)
    return dataclasses.replace(rest, parameters=shardings, optimizer=optimizer)


def flat_parameters(parameters: Parameters) -> dict[str, Any]:
    """Return parameters by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def step_key(state: TrainState) -> Array:
    """Return the random key of the next step: the run's key folded with the step."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)


def digest(tree: Any) -> str:
    """Return a SHA-256 over paths, dtypes, shapes and bytes of all leaves.

    If several processes hold parts of an array, all of them must call it.

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
