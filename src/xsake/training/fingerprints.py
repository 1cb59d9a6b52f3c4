"""Fingerprints of arrays, to detect changed bits in checkpoints and between replicas.

A checkpoint records one fingerprint per array. Replicas of a shard must have the same bits: each
device sums the bits of its shard, the sums are gathered, and a minority is reported.
"""

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey, keystr
from jaxtyping import Array, Int, UInt32

from xsake.errors import ArgumentError, CheckpointError, UnsupportedError
from xsake.training.processes import gather

MAX_NAMES_SHOWN = 5  # per message


# ---------- arrays of a checkpoint ----------


def leaves_by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, in tree order.

    The level between a flax variable and its array is skipped, so a state of variables and the same
    state as plain dictionaries have the same names.

    Example:
        >>> list(leaves_by_name({"weights": [1, 2], "step": 3}))
        ['step', 'weights/0', 'weights/1']
    """
    leaves: dict[str, Any] = {}
    clashes: list[str] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if len(path) > 1 and path[-1] == GetAttrKey("value"):
            path = path[:-1]
        name = keystr(path, simple=True, separator="/")
        if not name.isprintable() or {"", ".", ".."} & set(name.split("/")):
            raise ArgumentError(
                "leaf-name", "a leaf has an unusable name", got=repr(name)[:200],
                expected="a tree of named parts, such as a dictionary or a dataclass",
                fix="use printable characters, not '', '.' or '..'",
            )  # fmt: skip
        clashes += [name] if name in leaves else []
        leaves[name] = leaf
    clashes += [name for name in leaves if leaves.keys() & _parents(name)]
    if clashes:
        raise ArgumentError(
            "leaf-duplicate", "two leaves of the tree have the same name", got=repr(clashes[0]),
            expected="names that differ, without '/' in them", fix="rename one of the two",
        )  # fmt: skip
    return leaves


def named_arrays(tree: Any) -> dict[str, jax.Array | np.ndarray]:
    """Return the leaves of a tree by name; all must be arrays of JAX dtypes."""
    leaves = {}
    for name, leaf in leaves_by_name(tree).items():
        leaf = np.asarray(leaf) if isinstance(leaf, np.generic) else leaf
        if not (isinstance(leaf, jax.Array) or _is_jax_dtype(leaf)):
            raise ArgumentError(
                "leaf-value",
                f"the leaf {name!r} cannot be saved",
                got=f"{type(leaf).__name__} of dtype {getattr(leaf, 'dtype', None)}",
                expected="a jax.Array, or a NumPy array of a JAX dtype",
                fix="convert it with jnp.asarray, or put it into `extra`",
            )
        leaves[name] = leaf
    if not leaves:
        raise ArgumentError(
            "no-leaves", "the tree has no arrays to save", got="no leaves", expected="arrays"
        )
    return leaves


def fingerprints(arrays: dict[str, Any]) -> dict[str, int]:
    """Return a 32-bit fingerprint of each array; any single changed element changes it.

    It is the sum of all 32-bit words of the array, each multiplied by an odd number that grows with
    its position, modulo 2**32, computed on the devices of the array. It is independent of the
    sharding and detects nearly all swaps. All processes of a run pass the same names.

    Example:
        >>> fingerprints({"a": np.array([1, 2], np.int32), "b": np.array([2, 1], np.int32)})
        {'a': 7, 'b': 5}
    """
    # One program per dtype and shape: optimizer state has those of the parameters.
    sums = jax.device_get({name: _weighted_sum(array) for name, array in arrays.items()})
    return {name: int(sums[name]) for name in arrays}


def require_same_tree(saved: dict[str, Any], like: dict[str, Any], *, where: str) -> None:
    """Raise unless a tree to restore has the names, dtypes and shapes of the saved leaves."""
    old = {name: _format_leaf(leaf.dtype, leaf.shape) for name, leaf in saved.items()}
    new = {name: _format_leaf(leaf.dtype, leaf.shape) for name, leaf in like.items()}
    if new == old:
        return
    changed = [name for name in new if name in old and new[name] != old[name]]
    parts = {
        "not saved": [name for name in new if name not in old],
        "saved but not requested": [name for name in old if name not in new],
        "of another dtype or shape": [
            f"{name} {old[name]}, requested as {new[name]}" for name in changed
        ],
    }
    raise CheckpointError(
        "other-tree",
        f"{where} has another tree than the requested one",
        got="; ".join(f"{what}: {_format_names(names)}" for what, names in parts.items() if names),
        expected="the same names, dtypes and shapes",
        fix="build the model and the optimizer with the settings of the run that saved it, or "
        "rename the leaves; no file was changed",
    )


def _parents(name: str) -> set[str]:
    parts = name.split("/")
    return {"/".join(parts[:end]) for end in range(1, len(parts))}


def _is_jax_dtype(leaf: Any) -> bool:
    if not isinstance(leaf, np.ndarray):
        return False
    is_number = leaf.dtype == np.bool_ or jnp.issubdtype(leaf.dtype, np.number)
    return is_number and jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype


@jax.jit
def _weighted_sum(array) -> jax.Array:
    words = _to_uint32(array)
    if not words.size:
        return jnp.uint32(0)
    position = jnp.uint32(0)
    for axis in range(words.ndim):
        stride = jnp.uint32(math.prod(words.shape[axis + 1 :]) % 2**32)
        position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * stride
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


def _format_leaf(dtype: Any, shape: Iterable[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _format_names(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_SHOWN
    return ", ".join(names[:MAX_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


# ---------- replicas ----------


@dataclass(frozen=True)
class ReplicaSum:
    """Bit sum of one replica of a shard, modulo 2**32; device None: only the process is known."""

    process: int
    device: int | None
    bit_sum: int

    def __str__(self) -> str:
        owner = f"process {self.process}"
        return owner if self.device is None else f"{owner} (device {self.device})"


@dataclass(frozen=True)
class ReplicaMismatch:
    """Replicas of one shard of a leaf that differ."""

    leaf: str
    suspects: tuple[ReplicaSum, ...]  # the minority; all replicas if no value has a majority
    copies: int  # number of replicas
    is_decided: bool  # whether more than half of them agree

    def __str__(self) -> str:
        if self.is_decided:
            owners = ", ".join(map(str, self.suspects))
            agreeing = self.copies - len(self.suspects)
            return f"{self.leaf}: {owners} against {agreeing} copies that agree"
        sums = ", ".join(f"{copy} has {copy.bit_sum:#010x}" for copy in self.suspects)
        return f"{self.leaf}: no majority: {sums}"


def find_mismatches(tree: Any) -> tuple[ReplicaMismatch, ...]:
    """Return all replicas that differ between devices and processes.

    All processes must call it with the same tree and get the same result. Shards without replicas
    are not compared. Arrays without a mesh count as replicated over the processes.
    """
    by_mesh: dict[Mesh | None, list[tuple[str, Any]]] = collections.defaultdict(list)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaf = _to_array(name, leaf)
        by_mesh[_find_mesh(name, leaf)].append((name, leaf))
    mismatches: list[ReplicaMismatch] = []
    for mesh, named in by_mesh.items():
        names, leaves = zip(*named, strict=True)
        if mesh is None:
            mismatches += _compare_processes(names, leaves)
        else:
            mismatches += _compare_devices(mesh, names, leaves)
    return tuple(mismatches)


def find_minority(
    sums: UInt32[np.ndarray, " copies"], owners: Sequence[tuple[int, int | None]]
) -> tuple[tuple[ReplicaSum, ...], bool]:
    """Return the replicas that disagree with the majority, and whether there is a majority.

    Example:
        >>> owners = [(0, 0), (1, 1), (2, 2)]
        >>> suspects, is_decided = find_minority(np.array([7, 7, 8], np.uint32), owners)
        >>> print(*suspects, is_decided)
        process 2 (device 2) True
    """
    copies = [ReplicaSum(*owner, int(bit_sum)) for owner, bit_sum in zip(owners, sums, strict=True)]
    (majority, votes), *others = collections.Counter(sums.tolist()).most_common()
    if not others:
        return (), True
    is_decided = 2 * votes > len(copies)
    return tuple(copy for copy in copies if not is_decided or copy.bit_sum != majority), is_decided


@jax.jit
def bit_sums(leaves: Sequence[Array]) -> UInt32[Array, " leaves"]:
    """Return the sum of each array's bits as unsigned words of at most 32 bits, modulo 2**32."""
    return jnp.stack([jnp.sum(_to_uint32(leaf), dtype=jnp.uint32) for leaf in leaves])


def _to_array(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise ArgumentError(
            "leaf-type", "the tree has a leaf that is not an array",
            got=f"{name}: {type(leaf).__name__}",
            expected="a tree of arrays",
        )  # fmt: skip
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        # Without jax_enable_x64 devices have no 64-bit types.
        return leaf.reshape(-1).view(np.uint32) if leaf.dtype.itemsize > 4 else leaf
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else leaf


def _find_mesh(name: str, leaf: Any) -> Mesh | None:
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return sharding.mesh
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        what = "replicas can be located for a NamedSharding only"
        raise UnsupportedError("replica-sharding", what, got=f"{name}: {sharding}")
    return None


def _compare_processes(names: Sequence[str], leaves: Sequence[Any]) -> Iterator[ReplicaMismatch]:
    sums = gather(np.asarray(bit_sums(tuple(leaves))))
    owners = [(process, None) for process in range(len(sums))]
    all_processes = np.arange(len(sums))[None]
    for name, column in zip(names, sums.T, strict=True):
        yield from _compare_leaf(name, column, all_processes, owners)


def _compare_devices(
    mesh: Mesh, names: Sequence[str], leaves: Sequence[Any]
) -> Iterator[ReplicaMismatch]:
    program = _make_program(mesh, tuple(leaf.sharding.spec for leaf in leaves))
    sums = np.asarray(multihost_utils.process_allgather(program(*leaves), tiled=True))
    owners = [(device.process_index, device.id) for device in mesh.devices.flat]
    for name, leaf, column in zip(names, leaves, sums.T, strict=True):
        yield from _compare_leaf(name, column, _replica_rows(leaf.sharding, leaf.shape), owners)


def _compare_leaf(
    name: str,
    column: UInt32[np.ndarray, " replicas"],
    parts: Int[np.ndarray, "parts copies"],
    owners: Sequence[tuple[int, int | None]],
) -> Iterator[ReplicaMismatch]:
    sums = column[parts]
    for part in np.flatnonzero((sums != sums[:, :1]).any(axis=1)):
        suspects, is_decided = find_minority(sums[part], [owners[row] for row in parts[part]])
        yield ReplicaMismatch(name, suspects, parts.shape[1], is_decided)


@functools.lru_cache(maxsize=16)
def _make_program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., Array]:
    """Sum the bits on every device separately; replicas are not assumed to be equal."""

    def sum_local(*leaves: Array) -> UInt32[Array, "1 leaves"]:
        return bit_sums(leaves)[None]

    row_per_device = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            sum_local, mesh=mesh, in_specs=specs, out_specs=row_per_device, check_vma=False
        )
    )


@functools.lru_cache(maxsize=4096)
def _replica_rows(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> Int[np.ndarray, "parts copies"]:
    """Return, for every shard of an array, the mesh positions of the devices that hold it."""
    rows = {device: row for row, device in enumerate(sharding.mesh.devices.flat)}
    parts: dict[tuple[tuple[int, int, int], ...], list[int]] = collections.defaultdict(list)
    for device, index in sharding.devices_indices_map(shape).items():
        extents = zip(index, shape, strict=True)
        parts[tuple(piece.indices(size) for piece, size in extents)].append(rows[device])
    return np.array([sorted(part) for part in parts.values()])
