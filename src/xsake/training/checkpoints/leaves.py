"""Names, checks and fingerprints of the arrays of a tree; no file access."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, KeyEntry, keystr

from xsake.errors import ArgumentError, CheckpointError

SEPARATOR = "/"
MAX_NAMES_SHOWN = 5  # per message


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by name, in tree order.

    A name is the path of the leaf. The level between a flax variable and its array is skipped, so a
    state of variables and the same state as plain dictionaries have the same names.

    Args:
        tree: a pytree.

    Example:
        >>> list(leaves_by_name({"weights": [1, 2], "step": 3}))
        ['step', 'weights/0', 'weights/1']
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        if not name.isprintable() or {"", ".", ".."} & set(name.split(SEPARATOR)):
            raise ArgumentError(
                "a leaf has an unusable name",
                got=repr(name)[:200],
                expected="a tree of named parts, such as a dictionary or a dataclass",
                fix="use printable characters, not '', '.' or '..'",
            )
        if name in leaves:
            raise _ambiguous_name(name)
        leaves[name] = leaf
    for name in leaves:
        parts = name.split(SEPARATOR)
        if any(SEPARATOR.join(parts[:end]) in leaves for end in range(1, len(parts))):
            raise _ambiguous_name(name)
    return leaves


def arrays(tree: Any) -> dict[str, jax.Array | np.ndarray]:
    """Return the leaves of a tree by name; all must be arrays of JAX dtypes."""
    leaves = {}
    for name, leaf in leaves_by_name(tree).items():
        if isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        if not (isinstance(leaf, jax.Array) or _is_jax_dtype(leaf)):
            raise ArgumentError(
                f"the leaf {name!r} cannot be saved",
                got=f"{type(leaf).__name__} of dtype {getattr(leaf, 'dtype', None)}",
                expected="a jax.Array, or a NumPy array of a JAX dtype",
                fix="convert it with jnp.asarray, or put it into `extra`",
            )
        leaves[name] = leaf
    if not leaves:
        raise ArgumentError(
            "the tree has no arrays to save", got="a tree without leaves", expected="arrays"
        )
    return leaves


def fingerprints(arrays: dict[str, Any]) -> dict[str, int]:
    """Return a 32-bit fingerprint of each array; any single changed element changes it.

    It is the sum of all 32-bit words of the array, each multiplied by an odd number that grows with
    its position, modulo 2**32. It is independent of the sharding and detects nearly all swaps. It
    is computed on the devices of the array.

    Args:
        arrays: by name; all processes of a run pass the same names.

    Example:
        >>> fingerprints({"a": np.array([1, 2], np.int32), "b": np.array([2, 1], np.int32)})
        {'a': 7, 'b': 5}
    """
    # One program per dtype and shape: optimizer state has those of the parameters.
    sums = jax.device_get({name: _sum(array) for name, array in arrays.items()})
    return {name: int(sums[name]) for name in arrays}


def check_same_tree(
    saved: dict[str, tuple[str, tuple[int, ...]]], like: dict[str, Any], *, where: str
) -> None:
    """Raise unless a tree to restore has exactly the saved leaves.

    Args:
        saved: dtype and shape by name.
        like: requested leaves by name.
        where: source of the saved leaves, for messages.
    """
    requested = {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in like.items()}
    if requested == saved:
        return
    changed = [name for name in requested if name in saved and requested[name] != saved[name]]
    parts = {
        "not saved": [name for name in requested if name not in saved],
        "saved but not requested": [name for name in saved if name not in requested],
        "of another dtype or shape": [
            f"{name} {_format_leaf(saved[name])}, requested as {_format_leaf(requested[name])}"
            for name in changed
        ],
    }
    raise CheckpointError(
        f"{where} has another tree than the requested one",
        got="; ".join(f"{what}: {_format_names(names)}" for what, names in parts.items() if names),
        expected="the same names, dtypes and shapes",
        fix="build the model and the optimizer with the settings of the run that saved it, or "
        "rename the leaves; no file was changed",
    )


def _is_jax_dtype(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray):
        return False
    is_number = leaf.dtype == np.bool_ or jnp.issubdtype(leaf.dtype, np.number)
    return is_number and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype


def _name(path: tuple[KeyEntry, ...]) -> str:
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return keystr(path, simple=True, separator=SEPARATOR)


def _ambiguous_name(name: str) -> ArgumentError:
    return ArgumentError(
        "two leaves of the tree have the same name",
        got=repr(name),
        expected=f"names that differ, without {SEPARATOR!r} in them",
        fix="rename one of the two",
    )


@jax.jit
def _sum(array) -> jax.Array:
    words = _to_uint32(array)
    if not words.size:
        return jnp.uint32(0)
    position = jnp.uint32(0)
    for axis in range(words.ndim):
        stride = jnp.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        step = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
        position = position + step
    return jnp.sum(words * (2 * position + 1), dtype=jnp.uint32)


def _to_uint32(array) -> jax.Array:
    """Return an array's bits as uint32: one word per element, two for 64-bit elements."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(array)
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], axis=-1)
    to = functools.partial(jax.lax.bitcast_convert_type, array)
    is_integer = jnp.issubdtype(array.dtype, jnp.integer)
    bits = (jnp.iinfo if is_integer else jnp.finfo)(array.dtype).bits
    return to(jnp.uint32) if bits >= 32 else to(f"uint{bits}").astype(jnp.uint32)


def _format_leaf(leaf: tuple[str, tuple[int, ...]]) -> str:
    return f"{leaf[0]}[{', '.join(map(str, leaf[1]))}]"


def _format_names(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
