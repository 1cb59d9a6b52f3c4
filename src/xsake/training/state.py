"""Training state, the definition of the model it belongs to, and the devices that hold it."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Int, Int32

from xsake.attention import BlockSparseAttention
from xsake.distributed import (
    ContextParallel,
    HeadPlacement,
    MeshShape,
    NamedShape,
    batch_sharding,
    batch_share,
    logical_sharding,
    make_mesh,
)
from xsake.distributed.head_balancing import Q_HEADS
from xsake.errors import ArgumentError
from xsake.model import Decoder, huggingface
from xsake.training.config import TrainingConfig
from xsake.training.data import TokenLoader
from xsake.training.optimizer import Optimizer, make_optimizer, unflatten
from xsake.training.reliability import init_guard

Parameters = dict[str, Any]
"""Nested dictionaries of float32 arrays; the keys form the path of a parameter."""

KvOrder = Sequence[Sequence[int]]
"""Index of the kv head at each position, by layer."""

ShardingRule = Callable[[str, tuple[str, ...], tuple[int, ...]], Sharding]
"""Maps a parameter's path, logical axis names and shape to its sharding."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything the next step depends on, as a pytree of arrays."""

    step: Any  # int32, number of batches read; skipped updates count
    parameters: Any  # float32, see `ModelDefinition.parameters`
    optimizer: Any  # state of `Optimizer.transform`
    key: Any  # uint32, data of the run's random key; see `step_key`
    guard: Any  # state of the update filter


@dataclasses.dataclass(frozen=True, eq=False)
class ModelDefinition:
    """A decoder without its parameter values: nnx graph, shapes and names of the parameters."""

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


def init_state(config: TrainingConfig) -> TrainState:
    """Build the state before the first step from `run.seed`.

    Under `jax.jit` with `out_shardings` each device holds only its shard.
    """
    weights, draws = jax.random.split(jax.random.key(config.run.seed))
    model = make_model(config, weights)
    definition = ModelDefinition.from_model(model)
    parameters = definition.parameters(model)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        parameters=parameters,
        optimizer=build_optimizer(config, definition).transform.init(parameters),
        key=jax.random.key_data(draws),
        guard=init_guard(config.guard),
    )


def load_weights(config: TrainingConfig, folder: Path) -> Parameters:
    """Load the parameters of a Hugging Face directory, of the same sizes as the run's model."""
    model = huggingface.load(folder).model
    decoder, drawn = config.model.decoder, {"indexer", "native_sparse"}
    exclude = drawn if decoder.has_learned_positions else {*drawn, "context"}
    own, given = (x.model_dump(exclude=exclude) for x in (decoder, model.config))
    other = [name for name in own if own[name] != given[name]]
    if other:
        raise ArgumentError(
            "weights-config", "the weights are of another model than `model.decoder`",
            got=", ".join(f"{name}={given[name]!r}" for name in other),
            expected=", ".join(f"{name}={own[name]!r}" for name in other),
            fix=f"use the configuration of {folder}",
        )  # fmt: skip
    return ModelDefinition.from_model(model).parameters(model)


def _replace(parameters: Parameters, weights: Parameters) -> Parameters:
    """Return parameters with those of `weights` in place of the drawn ones."""
    flat, new = flat_parameters(parameters), flat_parameters(weights)

    def place(drawn: Array, value: Array) -> Array:
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, drawn.sharding, lambda index: host[index])

    return unflatten({path: place(x, new[path]) if path in new else x for path, x in flat.items()})


def abstract_state(config: TrainingConfig) -> TrainState:
    """Return shapes and dtypes of a run's state; nothing is computed."""
    return jax.eval_shape(lambda: init_state(config))


def step_key(state: TrainState) -> Array:
    """Return the random key of the next step: the run's key folded with the step."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)


def flat_parameters(parameters: Parameters) -> dict[str, Any]:
    """Return parameters by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(parameters)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}


def reorder_heads(
    order: KvOrder,
    parameters: Parameters,
    names: dict[str, tuple[str, ...]],
    *,
    is_inverse: bool = False,
) -> Parameters:
    """Return a decoder's parameters with reordered heads; its function is unchanged."""
    flat = flat_parameters(parameters)
    kv_order, work = np.array(order), np.zeros((len(order), 1))
    q_heads = next(
        x.shape[names[path].index(Q_HEADS)] for path, x in flat.items() if Q_HEADS in names[path]
    )
    placement = HeadPlacement(kv_order, q_heads // kv_order.shape[1], 1, work, work)
    if is_inverse:
        placement = placement.inverse()
    return unflatten({path: placement.apply(x, names[path]) for path, x in flat.items()})


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


# ---------- devices ----------


@dataclasses.dataclass(frozen=True, eq=False)
class Shardings:
    """Shardings of the arguments of a step: a `TrainState` of shardings, and of the tokens."""

    state: TrainState
    tokens: Sharding


def state_shardings(
    config: TrainingConfig, sharding_rule: ShardingRule, replicated: Sharding
) -> TrainState:
    """Return the shardings of a run's state: moments as their parameters, the rest replicated."""
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


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceSetup:
    """Mesh, shardings and attention operator of a run; for one device the first two are None."""

    mesh: Mesh | None
    shardings: Shardings | None
    operator: BlockSparseAttention

    @classmethod
    def from_config(cls, config: TrainingConfig) -> "DeviceSetup":
        """Build the mesh of a configuration; called by every process."""
        shape = MeshShape(**config.mesh.model_dump())
        if shape.devices == 1 and jax.process_count() == 1:
            return cls(None, None, BlockSparseAttention())
        mesh = make_mesh(shape)
        rule = lambda path, names, shape: logical_sharding(NamedShape(path, names, shape), mesh)
        state = state_shardings(config, rule, NamedSharding(mesh, PartitionSpec()))
        operator_type = ContextParallel if config.mesh.context > 1 else BlockSparseAttention
        return cls(mesh, Shardings(state, batch_sharding(mesh)), operator_type(mesh=mesh))

    def init_state(self, config: TrainingConfig, kv_order: KvOrder | None = None) -> TrainState:
        """Build the state before the first step with its shardings and the order of its heads."""

        def order(parameters: Parameters) -> Parameters:
            if kv_order is None:
                return parameters
            # Moments are zero before the first step, in any order.
            return reorder_heads(kv_order, parameters, define_model(config).names)

        def build() -> TrainState:
            state = init_state(config)
            return dataclasses.replace(state, parameters=order(state.parameters))

        shardings = None if self.shardings is None else self.shardings.state
        state = jax.jit(build, out_shardings=shardings)()
        if config.model.weights is None:
            return state
        weights = order(load_weights(config, config.model.weights))
        return dataclasses.replace(state, parameters=_replace(state.parameters, weights))

    def abstract_state(self, config: TrainingConfig) -> TrainState:
        """Return shapes, dtypes and shardings of the state, for restoring a checkpoint."""
        state = abstract_state(config)
        if self.shardings is None:
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            shardings = jax.tree.map(lambda _: here, state)
        else:
            shardings = self.shardings.state
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
        )

    def loader(self, config: TrainingConfig, **options: Any) -> TokenLoader:
        """Open the loader of this process's batches."""
        share = (0, 1) if self.mesh is None else batch_share(self.mesh)
        data = config.data
        options.setdefault("verify", data.verify)
        return TokenLoader(
            data.folder, context=data.context, batch=data.batch, seed=data.seed,
            process=share[0], processes=share[1], vocabulary=config.model.decoder.vocab_size,
            **options,
        )  # fmt: skip

    def put(self, tokens: Int32[np.ndarray, "B T1"]) -> Int[Array, "G T1"]:
        """Place this process's rows as its shard of the global batch."""
        if self.shardings is None:
            return jax.device_put(tokens)
        return jax.make_array_from_process_local_data(self.shardings.tokens, tokens)
