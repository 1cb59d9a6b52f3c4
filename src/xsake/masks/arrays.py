"""Array helpers of masks: NumPy or JAX namespace, position checks, integer division."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer

from xsake.errors import ShapeError

# Positions may be plain ints, NumPy arrays or scalars, or JAX arrays, tracers included.
Positions = Integer[Array | np.ndarray | np.generic, "..."] | int
# Booleans and int8 `Coverage` codes: arrays of the namespace in use, or a NumPy scalar for a
# constant.
Answer = Any
Codes = Any

# "No limit" as an int32. Positions never exceed it, so `position - UNBOUNDED` is at most zero and
# never overflows.
UNBOUNDED = 2**31 - 1


def namespace(*arrays: object) -> ModuleType:
    """Return `jax.numpy` if any array is a JAX array or tracer, else `numpy`."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def as_positions(xp: ModuleType, values: Positions, name: str):
    """Convert `values` to a signed integer array of `xp`, at least 32 bits wide."""
    array = xp.asarray(values)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ShapeError(
            f"`{name}` must hold integers", got=f"dtype {array.dtype}", expected="an integer dtype"
        )
    if jnp.issubdtype(array.dtype, jnp.unsignedinteger):
        # JAX without x64 cannot widen; positions fit int32 by contract.
        return array.astype(np.int64 if xp is np else np.int32)
    return array if array.dtype.itemsize >= 4 else array.astype(np.int32)


def with_rank(array: Any, rank: int) -> Any:
    """Prepend axes of size 1 up to `rank` axes."""
    return array if array.ndim == rank else array.reshape((1,) * (rank - array.ndim) + array.shape)


def subtract(values, amount):
    """Return `values - amount`; a no-op if `amount` is the Python int 0."""
    return values if isinstance(amount, int) and amount == 0 else values - amount


def quotient(xp: ModuleType, values, size):
    """Return `values // size` for values >= 0; a shift for Python powers of two."""
    if isinstance(size, int) and size & (size - 1) == 0:
        return values >> (size.bit_length() - 1)
    if xp is np:
        return values // size
    # jax.numpy's `//` also handles negative numbers, which costs several more operations.
    return jax.lax.div(*jnp.broadcast_arrays(values, jnp.asarray(size, values.dtype)))


def remainder(xp: ModuleType, values, size):
    """Return `values % size` for values >= 0; a bit mask for Python powers of two."""
    if isinstance(size, int) and size & (size - 1) == 0:
        return values & (size - 1)
    if xp is np:
        return values % size
    return jax.lax.rem(*jnp.broadcast_arrays(values, jnp.asarray(size, values.dtype)))


def look_up(xp: ModuleType, table: np.ndarray, *indices):
    """Return `table[indices]` for in-range indices, without JAX's bounds handling."""
    if xp is np:
        return table[indices]
    return jnp.asarray(table).at[indices].get(mode="promise_in_bounds")
