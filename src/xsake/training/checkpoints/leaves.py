"""Names the arrays of a tree, describes them, and sums up their bits; knows no files."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import GetAttrKey, KeyEntry, keystr

from xsake.errors import ArgumentError, CheckpointError

SEPARATOR = "/"
MOST_NAMED = 5  # in a message


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by name, in its own order.

    A name is the path to the leaf. What flax puts between a variable and its array does not
    count, so a state of variables and the same state as plain dictionaries have the same names.

    Args:
        tree: a pytree; None stands for nothing in it.

    Example:
        >>> list(named({"weights": [1, 2], "step": 3}))
        ['step', 'weights/0', 'weights/1']
    """
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        if not name.isprintable() or {"", ".", ".."} & set(name.split(SEPARATOR)):
            raise ArgumentError(
                "a leaf cannot be kept under its name",
                got=repr(name)[:200],
                expected="a tree of named parts, such as a dictionary or a dataclass",
                fix="name the part with printable characters, not '', '.' or '..'",
            )
        if name in found:
            raise _ambiguous(name)
        found[name] = leaf
    for name in found:
        parts = name.split(SEPARATOR)
        if any(SEPARATOR.join(parts[:end]) in found for end in range(1, len(parts))):
            raise _ambiguous(name)
    return found


def arrays(tree: Any) -> dict[str, jax.Array | np.ndarray]:
    """The leaves of a tree by name, every one an array that JAX holds without changing it."""
    found = {}
    for name, leaf in named(tree).items():
        if isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        if not (isinstance(leaf, jax.Array) or _is_held_by_jax(leaf)):
            raise ArgumentError(
                f"the leaf {name!r} cannot be saved",
                got=f"{type(leaf).__name__} of dtype {getattr(leaf, 'dtype', None)}",
                expected="a jax.Array, or a NumPy array of a dtype that JAX uses",
                fix="turn it into an array with jnp.asarray, or put it into `extra`",
            )
        found[name] = leaf
    if not found:
        raise ArgumentError(
            "there is nothing to save", got="a tree without leaves", expected="arrays"
        )
    return found


def fingerprints(found: dict[str, Any]) -> dict[str, int]:
    """A number of 32 bits for each array, which any single changed element changes.

    It is the sum over all words of the array's bits, each times an odd number that grows with its
    place, modulo 2**32: it does not depend on how devices share the array, and parts that change
    places are nearly always noticed as well. It is computed where the array is.

    Args:
        found: arrays by name; every process of a run calls this with the same ones.

    Example:
        >>> fingerprints({"a": np.array([1, 2], np.int32), "b": np.array([2, 1], np.int32)})
        {'a': 7, 'b': 5}
    """
    # One program for each dtype and shape: an optimizer has those of the parameters again.
    sums = jax.device_get({name: _sum(array) for name, array in found.items()})
    return {name: int(sums[name]) for name in found}


def check_alike(
    saved: dict[str, tuple[str, tuple[int, ...]]], like: dict[str, Any], *, where: str
) -> None:
    """Raise unless a tree to be filled has just the leaves that were saved.

    Args:
        saved: dtype and shape by name.
        like: what will be filled, by name.
        where: what was saved, for messages.
    """
    wanted = {name: (str(leaf.dtype), tuple(leaf.shape)) for name, leaf in like.items()}
    if wanted == saved:
        return
    changed = [name for name in wanted if name in saved and wanted[name] != saved[name]]
    parts = {
        "not saved": [name for name in wanted if name not in saved],
        "saved but not asked for": [name for name in saved if name not in wanted],
        "of another dtype or shape": [
            f"{name} {_told(saved[name])}, asked for as {_told(wanted[name])}" for name in changed
        ],
    }
    raise CheckpointError(
        f"{where} holds another tree than the one asked for",
        got="; ".join(f"{what}: {_listed(names)}" for what, names in parts.items() if names),
        expected="the same names, dtypes and shapes",
        fix="build the model and the optimizer with the settings of the run that saved it, or "
        "rename the leaves; nothing was changed on the disk",
    )


def _is_held_by_jax(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray):
        return False
    is_number = leaf.dtype == np.bool_ or jnp.issubdtype(leaf.dtype, np.number)
    return is_number and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype


def _name(path: tuple[KeyEntry, ...]) -> str:
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return keystr(path, simple=True, separator=SEPARATOR)


def _ambiguous(name: str) -> ArgumentError:
    return ArgumentError(
        "two parts of the tree would be kept under one name",
        got=repr(name),
        expected=f"names that differ, without {SEPARATOR!r} in them",
        fix="rename one of the two",
    )


@jax.jit
def _sum(array) -> jax.Array:
    words = _words(array)
    if not words.size:
        return jnp.uint32(0)
    place = jnp.uint32(0)
    for axis in range(words.ndim):
        stride = jnp.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        step = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
        place = place + step
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


def _words(array) -> jax.Array:
    """An array's bits as uint32: one of them for each element, or two for one of 64 bits."""
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


def _told(leaf: tuple[str, tuple[int, ...]]) -> str:
    return f"{leaf[0]}[{', '.join(map(str, leaf[1]))}]"


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
