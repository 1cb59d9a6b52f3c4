"""Devices of a run: one device, or a mesh over all processes."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Int32

from xsake.attention import BlockSparseAttention
from xsake.distributed import (
    ContextParallel,
    MeshShape,
    NamedShape,
    batch_sharding,
    batch_share,
    logical_sharding,
    make_mesh,
)
from xsake.training.balanced import KvOrder, reorder_heads
from xsake.training.config import TrainingConfig
from xsake.training.data import TokenLoader
from xsake.training.state import (
    Shardings,
    TrainState,
    abstract_state,
    define_model,
    init_state,
    state_shardings,
)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceSetup:
    """Mesh, shardings and attention operator of a run.

    Args:
        mesh: None for one device.
        shardings: of state and tokens; None for one device.
        operator: attention operator for the mesh.
    """

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
        sharding_rule = lambda path, names, shape: logical_sharding(
            NamedShape(path, names, shape), mesh
        )
        state = state_shardings(config, sharding_rule, NamedSharding(mesh, PartitionSpec()))
        operator = (
            ContextParallel(mesh=mesh)
            if config.mesh.context > 1
            else BlockSparseAttention(mesh=mesh)
        )
        return cls(mesh, Shardings(state, batch_sharding(mesh)), operator)

    def init_state(self, config: TrainingConfig, kv_order: KvOrder | None = None) -> TrainState:
        """Build the state before the first step with its shardings.

        Args:
            config: of the run.
            kv_order: order of the kv heads in the weights; None: unchanged.
        """

        def build() -> TrainState:
            state = init_state(config)
            if kv_order is None:
                return state
            # Moments are zero before the first step, in any order.
            parameters = reorder_heads(kv_order, state.parameters, define_model(config).names)
            return dataclasses.replace(state, parameters=parameters)

        where = None if self.shardings is None else self.shardings.state
        return jax.jit(build, out_shardings=where)()

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
