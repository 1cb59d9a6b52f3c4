"""Detection of silent data corruption: compare bit sums of replicated arrays.

Replicas of a shard must have the same bits. Each device sums the bits of its shard; the sums are
gathered, and a minority is reported. A single flipped bit always changes the sum.
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
class ReplicaSum:
    """Bit sum of one replica of a shard.

    Args:
        process: that holds it.
        device: that holds it; None if only the process is known.
        bit_sum: modulo 2**32.
    """

    process: int
    device: int | None
    bit_sum: int

    def __str__(self) -> str:
        owner = f"process {self.process}"
        return owner if self.device is None else f"{owner} (device {self.device})"


@dataclass(frozen=True)
class ReplicaMismatch:
    """Replicas of one shard of a leaf that differ.

    Args:
        leaf: its name.
        suspects: the minority; all replicas if no value has a majority.
        copies: number of replicas.
        is_decided: whether more than half of the replicas agree.
    """

    leaf: str
    suspects: tuple[ReplicaSum, ...]
    copies: int
    is_decided: bool

    @property
    def processes(self) -> tuple[int, ...]:
        """Processes that hold the suspects."""
        return tuple(sorted({copy.process for copy in self.suspects}))

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

    Args:
        tree: of arrays, such as the parameters.
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

    Args:
        sums: bit sum of every replica.
        owners: process and device of every replica.

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
    """Return the sum of each array's bits as unsigned words of at most 32 bits, modulo 2**32.

    Args:
        leaves: arrays of any dtype and shape.
    """
    return jnp.stack([_bit_sum(leaf) for leaf in leaves])


def _bit_sum(leaf: Array) -> UInt32[Array, ""]:
    if jnp.iscomplexobj(leaf):
        leaf = jnp.stack([leaf.real, leaf.imag])
    if leaf.dtype == jnp.bool_:
        sums = leaf
    else:
        is_integer = jnp.issubdtype(leaf.dtype, jnp.integer)
        bits = (jnp.iinfo if is_integer else jnp.finfo)(leaf.dtype).bits
        sums = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{min(bits, 32)}"))
    return jnp.sum(sums.astype(jnp.uint32), dtype=jnp.uint32)


def _to_array(name: str, leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
        raise ArgumentError(
            "the tree has a leaf that is not an array",
            got=f"{name}: {type(leaf).__name__}",
            expected="a tree of arrays",
        )
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
        raise UnsupportedError(
            "replicas can be located for a NamedSharding only",
            got=f"{name}: {sharding}",
        )
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
