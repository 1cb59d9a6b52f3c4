"""Lets a decoder read while somebody watches its layers, on one device or a document on each."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int

from xsake.model.attend import Attend, Dense
from xsake.model.decoder import Decoder


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
        if watch not in self._compiled:
            self._compiled[watch] = jax.jit(self._run(watch))
        return self._compiled[watch](self._weights, tokens)

    def _run(self, watch: Callable[..., Any]) -> Callable:
        def run(weights, tokens):
            model = nnx.merge(self._graph, weights)
            return model.observe(tokens, watch, attend=self._attend)

        if self._devices is None:
            return run
        mesh = Mesh(self._devices, ("data",))
        batch, found = PartitionSpec("data"), PartitionSpec(None, "data")
        return jax.shard_map(
            run, mesh=mesh, in_specs=(PartitionSpec(), batch), out_specs=found, check_vma=False
        )
