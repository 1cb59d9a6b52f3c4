"""Where a run's arrays lie: one device, or a mesh that all its processes make together."""

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
    make_mesh,
    sharding_of,
)
from xsake.training.balanced import KvOrder, with_heads_in
from xsake.training.config import TrainingConfig
from xsake.training.data import TokenLoader
from xsake.training.state import (
    Shardings,
    TrainState,
    abstract_state,
    define,
    first_state,
    state_shardings,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Devices:
    """The devices of a run and what lies where.

    Args:
        mesh: None where there is one device.
        shardings: of state and tokens; None likewise.
        operator: attention that knows the mesh.
    """

    mesh: Mesh | None
    shardings: Shardings | None
    operator: BlockSparseAttention

    @classmethod
    def of(cls, config: TrainingConfig) -> "Devices":
        """As the configuration says it; every process calls this."""
        shape = MeshShape(**config.mesh.model_dump())
        if shape.devices == 1 and jax.process_count() == 1:
            return cls(None, None, BlockSparseAttention())
        mesh = make_mesh(shape)
        place = lambda path, names, shape: sharding_of(NamedShape(path, names, shape), mesh)
        state = state_shardings(config, place, NamedSharding(mesh, PartitionSpec()))
        operator = (
            ContextParallel(mesh=mesh)
            if config.mesh.context > 1
            else BlockSparseAttention(mesh=mesh)
        )
        return cls(mesh, Shardings(state, batch_sharding(mesh)), operator)

    def first_state(self, config: TrainingConfig, kv_order: KvOrder | None = None) -> TrainState:
        """The state before the first step, drawn where it lies.

        Args:
            config: the run.
            kv_order: in which the weights have the heads that were drawn; None: in their own.
        """

        def drawn() -> TrainState:
            state = first_state(config)
            if kv_order is None:
                return state
            # Moments are zero before the first step, whatever the order.
            moved = with_heads_in(kv_order, state.parameters, define(config).names)
            return dataclasses.replace(state, parameters=moved)

        where = None if self.shardings is None else self.shardings.state
        return jax.jit(drawn, out_shardings=where)()

    def like(self, config: TrainingConfig) -> TrainState:
        """Shapes, dtypes and places of the state, as a checkpoint is restored into."""
        state = abstract_state(config)
        if self.shardings is None:
            here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
            places = jax.tree.map(lambda _: here, state)
        else:
            places = self.shardings.state
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state, places
        )

    def loader(self, config: TrainingConfig, **given: Any) -> TokenLoader:
        """The batches of this process."""
        share = (0, 1) if self.mesh is None else batch_share(self.mesh)
        data = config.data
        given.setdefault("verify", data.verify)
        return TokenLoader(
            data.folder, context=data.context, batch=data.batch, seed=data.seed,
            process=share[0], processes=share[1], vocabulary=config.model.decoder.vocab_size,
            **given,
        )  # fmt: skip

    def put(self, tokens: Int32[np.ndarray, "B T1"]) -> Int[Array, "G T1"]:
        """This process's rows as its part of the whole batch."""
        if self.shardings is None:
            return jax.device_put(tokens)
        return jax.make_array_from_process_local_data(self.shardings.tokens, tokens)
