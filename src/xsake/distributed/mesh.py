"""Device mesh with four axes; communication-heavy axes are placed on nearby devices."""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from xsake.attention.sharded import BATCH_AXES
from xsake.errors import ArgumentError

AXES = ("data", "fsdp", "tensor", "context")
"""Mesh axes in order of increasing communication."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Size of each mesh axis; the product is the number of devices.

    Args:
        data: data parallelism: model replicas with different batch rows.
        fsdp: shards of every parameter, gathered on use; batch rows are split here too.
        tensor: tensor parallelism: shards of heads, MLP and vocabulary.
        context: context parallelism: shards of the sequence.

    Example:
        >>> MeshShape(data=2, tensor=4).devices
        8
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    context: int = 1

    def __post_init__(self):
        for axis, size in zip(AXES, self.sizes, strict=True):
            if type(size) is not int or size < 1:
                raise ArgumentError(
                    "mesh-axis-size", f"the mesh axis {axis!r} needs a positive integer size",
                    got=repr(size),
                    expected="1 or more", fix="use 1 for an unused axis",
                )  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes in the order of `AXES`."""
        return self.data, self.fsdp, self.tensor, self.context

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True))


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a mesh with the axes `AXES` over all devices of all processes.

    Every process must build the same mesh. Later axes have closer devices: by TPU topology, or by
    process and id elsewhere. Slices connected by DCN are split over `data`, or `data` and `fsdp`.

    Args:
        shape: size of each axis.
        devices: None uses all devices of all processes.

    Example:
        >>> import jax
        >>> dict(make_mesh(MeshShape(), jax.devices()[:1]).shape)
        {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 1}
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(device_array(shape, devices), AXES)


def device_array(shape: MeshShape, devices: Sequence[Any]) -> np.ndarray:
    """Return the devices as an array [data, fsdp, tensor, context]."""
    devices = list(devices)
    if len(devices) != shape.devices:
        raise ArgumentError(
            "mesh-size",
            "the mesh shape does not match the number of devices",
            got=f"{len(devices)} devices, {shape} = {shape.devices}",
            expected=f"axes whose product is {len(devices)}",
            fix="change an axis, or pass the devices to use",
        )
    ids = [device.id for device in devices]
    if len(set(ids)) != len(ids):
        duplicates = [number for number, n in collections.Counter(ids).items() if n > 1]
        raise ArgumentError(
            "duplicate-devices", "duplicate devices", got=f"ids {duplicates}", expected="once each"
        )
    devices.sort(key=lambda device: (_slice_index(device), device.process_index, device.id))
    slices = collections.Counter(_slice_index(device) for device in devices)
    if len(slices) > 1:
        outer = _split_slices(shape, slices)
        inner = tuple(n // m for n, m in zip(shape.sizes, outer, strict=True))
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    return mesh_utils.create_device_mesh(shape.sizes, devices, allow_split_physical_axes=True)


def _slice_index(device: Any) -> int:
    """Return the slice of a device; 0 on platforms without slices."""
    number = getattr(device, "slice_index", None)
    return 0 if number is None else number


def _split_slices(shape: MeshShape, slices: dict[int, int]) -> tuple[int, int, int, int]:
    """Return the number of slices along each axis."""
    if len(set(slices.values())) > 1:
        raise ArgumentError(
            "slice-sizes", "the slices have different numbers of devices",
            got=", ".join(f"slice {number}: {size}" for number, size in sorted(slices.items())),
            expected="equal slices", fix="pass the devices to use",
        )  # fmt: skip
    data_slices = math.gcd(shape.data, len(slices))
    fsdp_slices = len(slices) // data_slices
    if shape.fsdp % fsdp_slices:
        raise ArgumentError(
            "slice-crossing",
            "tensor or context shards would be in different slices",
            got=f"{len(slices)} slices, {shape}",
            expected=f"data * fsdp a multiple of {len(slices)}",
            fix="make data, or data and fsdp, a multiple of the number of slices",
        )
    return data_slices, fsdp_slices, 1, 1


class BatchShare(NamedTuple):
    """Part of the batch that a process provides: part `index` of `count` equal ones."""

    index: int
    count: int


def batch_share(mesh: Mesh, process: int | None = None) -> BatchShare:
    """Return the part of the batch of a process, for `jax.make_array_from_process_local_data`.

    Processes that differ only in tensor or context coordinates have the same share and must read
    the same rows.

    Args:
        mesh: from `make_mesh`.
        process: process index; None is this process.
    """
    process = jax.process_index() if process is None else process
    axes = [axis for axis in BATCH_AXES if axis in mesh.shape]
    rows = collections.defaultdict(set)
    for index, device in np.ndenumerate(mesh.devices):
        coordinates = [index[mesh.axis_names.index(axis)] for axis in axes]
        rows[device.process_index].add(tuple(coordinates))
    if process not in rows:
        raise ArgumentError(
            "process-outside-mesh", "the process has no device in the mesh",
            got=f"process {process}",
            expected=f"one of {sorted(rows)}",
        )  # fmt: skip
    shares = sorted({tuple(sorted(share)) for share in rows.values()})
    total = math.prod(mesh.shape[axis] for axis in axes)
    if sum(len(share) for share in shares) != total or len({len(x) for x in shares}) > 1:
        raise ArgumentError(
            "batch-overlap",
            "batch parts of processes overlap partially",
            got=f"{len(rows)} processes, mesh {dict(mesh.shape)}",
            expected="data * fsdp a multiple or a divisor of the number of processes",
            fix="change data or fsdp",
        )
    return BatchShare(shares.index(tuple(sorted(rows[process]))), len(shares))
