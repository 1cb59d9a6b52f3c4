"""`vmap` for kernels that have a batch axis already: the new axis joins it.

Left to itself, `vmap` adds an axis to every array of a kernel, but what a kernel copies by hand
must not have one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xsake.kernels.block_sparse.problem import Operands

_POSITIONS = ("q_positions", "kv_positions")


def folded(run: Callable, operands: Operands, *rest: Any) -> Any:
    """`run(operands, *rest)`, whose arrays and results all begin with the batch axis."""
    layout = operands.layout

    @jax.custom_batching.custom_vmap
    def call(arrays, traced, rest):
        return run(Operands(**arrays, layout=layout if traced is None else traced), *rest)

    @call.def_vmap
    def batched(size, is_batched, arrays, traced, rest):
        of_arrays, of_traced, of_rest = is_batched
        everything = lambda found: jax.tree.map(lambda _: True, found)
        if layout.batch > 1 or any(jax.tree.leaves(of_traced)):
            found = _one_after_another(call, is_batched, (arrays, traced, rest))
            return found, everything(found)
        batch = arrays["q"].shape[1 if of_arrays["q"] else 0]
        join = lambda x, new: _join(x, new, size, batch)
        whole = {
            # Positions may be one row for all batch elements.
            name: x if name in _POSITIONS and not new and x.shape[0] == 1 else join(x, new)
            for (name, x), new in zip(arrays.items(), of_arrays.values(), strict=True)
            if x is not None
        }
        found = call(dict.fromkeys(arrays) | whole, traced, jax.tree.map(join, rest, of_rest))
        found = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), found)
        return found, everything(found)

    arrays = operands._asdict()
    del arrays["layout"]
    return call(arrays, None if layout.is_static else layout, rest)


def _join(x, is_batched: bool, size: int, batch: int):
    """[size, batch or 1, ...], or [batch, ...] for all, as [size * batch, ...]."""
    x = x if is_batched else x[None]
    x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
    return x.reshape(size * batch, *x.shape[2:])


def _one_after_another(call: Callable, is_batched, arguments):
    """Call by call, for lists that belong to one batch element."""
    leaves, tree = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(is_batched)
    moving = [x for x, new in zip(leaves, flags, strict=True) if new]

    def one(slices):
        parts = iter(slices)
        own = [next(parts) if new else x for x, new in zip(leaves, flags, strict=True)]
        return call(*jax.tree.unflatten(tree, own))

    return lax.map(one, moving)
