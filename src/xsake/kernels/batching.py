"""Kernels under `vmap`.

`vmap` adds an axis to every array of a kernel, but arrays that a kernel copies by DMA must not have
one. `fold_batch` folds the new axis into the batch axis.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse.types import BlockSparseConfig, BlockSparseInputs, Gradients

_POSITIONS = ("q_positions", "kv_positions")


def define_backend(
    forward_pass: Callable, dq_pass: Callable, dkv_pass: Callable
) -> tuple[Callable, Callable]:
    """Make `forward` and `backward` of a backend with three passes, as `dispatch` calls them.

    `interpret` is that of the backend's kernels: False on a device.
    """

    def forward(
        inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str, interpret: Any = False
    ) -> tuple[Any, Any]:
        return fold_batch(lambda inputs: forward_pass(inputs, config, interpret), inputs)

    def backward(
        inputs: BlockSparseInputs, config: BlockSparseConfig, platform: str,
        *residuals: Any, interpret: Any = False,
    ) -> Gradients:  # fmt: skip
        def grads(inputs: BlockSparseInputs, *residuals: Any) -> tuple[Any, ...]:
            dq = dq_pass(inputs, config, *residuals, interpret=interpret)
            return dq, *dkv_pass(inputs, config, *residuals, interpret=interpret)

        return Gradients(*fold_batch(grads, inputs, *residuals))

    return forward, backward


def fold_batch(run: Callable, inputs: BlockSparseInputs, *rest: Any) -> Any:
    """`run(inputs, *rest)` under `vmap`; all arrays and results begin with the batch axis."""
    layout = inputs.layout

    @jax.custom_batching.custom_vmap
    def call(arrays, traced, rest):
        return run(BlockSparseInputs(**arrays, layout=layout if traced is None else traced), *rest)

    @call.def_vmap
    def rule(size, is_batched, arrays, traced, rest):
        of_arrays, of_traced, of_rest = is_batched
        all_batched = lambda results: jax.tree.map(lambda _: True, results)
        # A bias that batch elements share has one gradient, so it cannot be folded.
        has_bias = arrays["bias"] is not None
        if layout.batch > 1 or has_bias or any(jax.tree.leaves(of_traced)):
            results = _map_sequentially(call, is_batched, (arrays, traced, rest))
            return results, all_batched(results)
        batch = arrays["q"].shape[1 if of_arrays["q"] else 0]
        join = lambda x, new: _join(x, new, size, batch)
        whole = {
            # Positions may be one row for all batch elements.
            name: x if name in _POSITIONS and not new and x.shape[0] == 1 else join(x, new)
            for (name, x), new in zip(arrays.items(), of_arrays.values(), strict=True)
            if x is not None
        }
        results = call(dict.fromkeys(arrays) | whole, traced, jax.tree.map(join, rest, of_rest))
        results = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), results)
        return results, all_batched(results)

    arrays = inputs._asdict()
    del arrays["layout"]
    return call(arrays, None if layout.is_static else layout, rest)


def _join(x, is_batched: bool, size: int, batch: int):
    """[size, batch or 1, ...], or [batch, ...] for all, as [size * batch, ...]."""
    x = x if is_batched else x[None]
    x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])


def _map_sequentially(call: Callable, is_batched, arguments):
    """One call after another, for lists that differ between batch elements."""
    leaves, tree = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(is_batched)
    moving = [x for x, new in zip(leaves, flags, strict=True) if new]

    def one(slices):
        parts = iter(slices)
        slices_ = [next(parts) if new else x for x, new in zip(leaves, flags, strict=True)]
        return call(*jax.tree.unflatten(tree, slices_))

    return lax.map(one, moving)
