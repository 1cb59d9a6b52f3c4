"""Fingerprints of arrays that are held several times: finds the copy that silently went wrong.

Devices that keep the same part of an array must keep the same bits. Each sums the bits of what
it keeps, a few numbers travel, and whoever is outvoted is named. One flipped bit always changes
a sum.
"""

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, UInt32

from xsake.errors import ArgumentError, UnsupportedError
from xsake.training.processes import gather


@dataclass(frozen=True)
class Copy:
    """A copy of some part of a leaf, and the sum of its bits.

    Args:
        process: that holds it.
        device: that holds it; None if only the process is known.
        word: the sum.
    """

    process: int
    device: int | None
    word: int

    def __str__(self) -> str:
        place = f"process {self.process}"
        return place if self.device is None else f"{place} (device {self.device})"


@dataclass(frozen=True)
class Difference:
    """Copies of one part of a leaf that are not the same.

    Args:
        leaf: its name.
        suspects: the copies that are outvoted; all of them where no value has a majority.
        copies: how many there are.
        is_decided: more than half of the copies agree, against the suspects.
    """

    leaf: str
    suspects: tuple[Copy, ...]
    copies: int
    is_decided: bool

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that hold the suspects."""
        return tuple(sorted({copy.process for copy in self.suspects}))

    def __str__(self) -> str:
        if self.is_decided:
            places = ", ".join(map(str, self.suspects))
            agreeing = self.copies - len(self.suspects)
            return f"{self.leaf}: {places} against {agreeing} copies that agree"
        words = ", ".join(f"{copy} has {copy.word:#010x}" for copy in self.suspects)
        return f"{self.leaf}: no majority: {words}"


def differences(tree: Any) -> tuple[Difference, ...]:
    """What devices and processes that should hold the same bits do not agree on.

    All processes must call it, with the same tree; all get the same answer. Parts of arrays that
    exist only once have nothing to be compared with. Arrays that are not spread over a mesh are
    taken for copies that every process has.

    Args:
        tree: of arrays, such as the parameters.
    """
    by_mesh: dict[Mesh | None, list[tuple[str, Any]]] = collections.defaultdict(list)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaf = _plain(name, leaf)
        by_mesh[_mesh_of(name, leaf)].append((name, leaf))
    found: list[Difference] = []
    for mesh, named in by_mesh.items():
        names, leaves = zip(*named, strict=True)
        if mesh is None:
            found += _between_processes(names, leaves)
        else:
            found += _between_devices(mesh, names, leaves)
    return tuple(found)


def outvoted(
    words: UInt32[np.ndarray, " copies"], places: Sequence[tuple[int, int | None]]
) -> tuple[tuple[Copy, ...], bool]:
    """The copies that disagree with the majority, and whether there is one.

    Args:
        words: a sum for every copy.
        places: the process and the device of every copy.

    Example:
        >>> places = [(0, 0), (1, 1), (2, 2)]
        >>> suspects, is_decided = outvoted(np.array([7, 7, 8], np.uint32), places)
        >>> print(*suspects, is_decided)
        process 2 (device 2) True
    """
    copies = [Copy(*place, int(word)) for place, word in zip(places, words, strict=True)]
    (commonest, votes), *others = collections.Counter(words.tolist()).most_common()
    if not others:
        return (), True
    is_decided = 2 * votes > len(copies)
    return tuple(copy for copy in copies if not is_decided or copy.word != commonest), is_decided


@jax.jit
def word_sums(leaves: Sequence[Array]) -> UInt32[Array, " leaves"]:
    """The sum of the bits of every array, as unsigned words of at most 32 bits, modulo 2**32.

    Args:
        leaves: arrays of any type and shape.
    """
    return jnp.stack([_word_sum(leaf) for leaf in leaves])


def _word_sum(leaf: Array) -> UInt32[Array, ""]:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_:
        words = leaf
    else:
        is_integer = jnp.issubdtype(leaf.dtype, jnp.integer)
        bits = (jnp.iinfo if is_integer else jnp.finfo)(leaf.dtype).bits
        words = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{min(bits, 32)}"))
    return jnp.sum(words.astype(jnp.uint32), dtype=jnp.uint32)


def _plain(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise ArgumentError(
            "fingerprints are made of arrays",
            got=f"{name}: {type(leaf).__name__}",
            expected="a tree of arrays",
        )
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        # 64 bits do not fit on a device unless jax was told so.
        return leaf.reshape(-1).view(np.uint32) if leaf.dtype.itemsize > 4 else leaf
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _mesh_of(name: str, leaf: Any) -> Mesh | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise UnsupportedError(
            "where the copies of an array are is known from a NamedSharding only",
            got=f"{name}: {sharding}",
        )
    return None


def _between_processes(names: Sequence[str], leaves: Sequence[Any]) -> Iterator[Difference]:
    words = gather(np.asarray(word_sums(tuple(leaves))))
    places = [(process, None) for process in range(len(words))]
    everyone = np.arange(len(words))[None]
    for name, column in zip(names, words.T, strict=True):
        yield from _of_leaf(name, column, everyone, places)


def _between_devices(
    mesh: Mesh, names: Sequence[str], leaves: Sequence[Any]
) -> Iterator[Difference]:
    program = _program(mesh, tuple(leaf.sharding.spec for leaf in leaves))
    words = np.asarray(multihost_utils.process_allgather(program(*leaves), tiled=True))
    places = [(device.process_index, device.id) for device in mesh.devices.flat]
    for name, leaf, column in zip(names, leaves, words.T, strict=True):
        yield from _of_leaf(name, column, _copies(leaf.sharding, leaf.shape), places)


def _of_leaf(
    name: str,
    column: UInt32[np.ndarray, " places"],
    parts: Int[np.ndarray, "parts copies"],
    places: Sequence[tuple[int, int | None]],
) -> Iterator[Difference]:
    words = column[parts]
    for part in np.flatnonzero((words != words[:, :1]).any(axis=1)):
        suspects, is_decided = outvoted(words[part], [places[row] for row in parts[part]])
        yield Difference(name, suspects, parts.shape[1], is_decided)


@functools.lru_cache(maxsize=16)
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., Array]:
    """Every device sums what it holds itself: nothing may assume that copies are equal."""

    def of_one_device(*leaves: Array) -> UInt32[Array, "1 leaves"]:
        return word_sums(leaves)[None]

    one_row_each = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            of_one_device, mesh=mesh, in_specs=specs, out_specs=one_row_each, check_vma=False
        )
    )


@functools.lru_cache(maxsize=4096)
def _copies(sharding: NamedSharding, shape: tuple[int, ...]) -> Int[np.ndarray, "parts copies"]:
    """For every part of an array the devices that hold it, as places in the mesh."""
    rows = {device: row for row, device in enumerate(sharding.mesh.devices.flat)}
    parts: dict[tuple[tuple[int, int, int], ...], list[int]] = collections.defaultdict(list)
    for device, index in sharding.devices_indices_map(shape).items():
        extents = zip(index, shape, strict=True)
        parts[tuple(piece.indices(size) for piece, size in extents)].append(rows[device])
    return np.array([sorted(part) for part in parts.values()])
