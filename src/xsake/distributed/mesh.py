"""The device mesh: its four axes, devices in an order that keeps talkative neighbours near."""

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
"""By how much their devices have to say to each other, least first."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices each kind of splitting gets; the product is the number of devices.

    Args:
        data: copies of the model, each with rows of the batch of its own.
        fsdp: parts of every parameter, which are gathered when used; rows are split here too.
        tensor: parts of heads, MLP and vocabulary, which compute side by side.
        context: parts of the sequence.

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
                    f"the mesh axis {axis!r} needs a whole number of devices",
                    got=repr(size),
                    expected="1 or more",
                    fix="1 leaves an axis unused",
                )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The sizes in the order of `AXES`."""
        return self.data, self.fsdp, self.tensor, self.context

    @property
    def devices(self) -> int:
        """How many devices it takes."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True))


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes `AXES` over all devices of all processes.

    Every process has to make the same mesh. The devices of an axis further right are nearer to
    each other: on a TPU by its network, elsewhere by process and number. Slices of devices, which
    only a slow network connects, are kept apart by `data`, or by `data` and `fsdp`.

    Args:
        shape: devices of each axis.
        devices: which ones; None takes all there are, in every process.

    Example:
        >>> import jax
        >>> dict(make_mesh(MeshShape(), jax.devices()[:1]).shape)
        {'data': 1, 'fsdp': 1, 'tensor': 1, 'context': 1}
    """
    devices = jax.devices() if devices is None else devices
    return Mesh(arranged(shape, devices), AXES)


def arranged(shape: MeshShape, devices: Sequence[Any]) -> np.ndarray:
    """The devices as an array [data, fsdp, tensor, context]; needs no device to be real."""
    devices = list(devices)
    if len(devices) != shape.devices:
        raise ArgumentError(
            "the mesh does not fit the devices",
            got=f"{len(devices)} devices, {shape} = {shape.devices}",
            expected=f"axes whose product is {len(devices)}",
            fix="change an axis, or pass the devices to use",
        )
    numbers = [device.id for device in devices]
    if len(set(numbers)) != len(numbers):
        twice = [number for number, n in collections.Counter(numbers).items() if n > 1]
        raise ArgumentError("a device is given twice", got=f"devices {twice}", expected="once each")
    devices.sort(key=lambda device: (_slice(device), device.process_index, device.id))
    slices = collections.Counter(_slice(device) for device in devices)
    if len(slices) > 1:
        outer = _over_slices(shape, slices)
        inner = tuple(n // m for n, m in zip(shape.sizes, outer, strict=True))
        return mesh_utils.create_hybrid_device_mesh(
            inner, outer, devices, allow_split_physical_axes=True
        )
    return mesh_utils.create_device_mesh(shape.sizes, devices, allow_split_physical_axes=True)


def _slice(device: Any) -> int:
    """The slice that a device belongs to; 0 where the platform has no such thing."""
    number = getattr(device, "slice_index", None)
    return 0 if number is None else number


def _over_slices(shape: MeshShape, slices: dict[int, int]) -> tuple[int, int, int, int]:
    """How the slices are shared out to the axes."""
    if len(set(slices.values())) > 1:
        raise ArgumentError(
            "the slices have different numbers of devices",
            got=", ".join(f"slice {number}: {size}" for number, size in sorted(slices.items())),
            expected="equal slices",
            fix="pass the devices to use",
        )
    by_data = math.gcd(shape.data, len(slices))
    by_fsdp = len(slices) // by_data
    if shape.fsdp % by_fsdp:
        raise ArgumentError(
            "tensor or context neighbours would be in different slices",
            got=f"{len(slices)} slices, {shape}",
            expected=f"data * fsdp that {len(slices)} slices divide",
            fix="give data, or data and fsdp, a multiple of the number of slices",
        )
    return by_data, by_fsdp, 1, 1


class BatchShare(NamedTuple):
    """Which part of the batch a process provides: part `index` of `count` equal ones."""

    index: int
    count: int


def batch_share(mesh: Mesh, process: int | None = None) -> BatchShare:
    """Which part of the batch a process reads, to hand it to `make_array_from_process_local_data`.

    Processes that hold the same rows, because tensor or context parts of one model are spread over
    them, have the same share and must read the same rows.

    Args:
        mesh: from `make_mesh`.
        process: its number; None is this process.
    """
    process = jax.process_index() if process is None else process
    axes = [axis for axis in BATCH_AXES if axis in mesh.shape]
    rows = collections.defaultdict(set)
    for index, device in np.ndenumerate(mesh.devices):
        places = [index[mesh.axis_names.index(axis)] for axis in axes]
        rows[device.process_index].add(tuple(places))
    if process not in rows:
        raise ArgumentError(
            "the process has no device in the mesh",
            got=f"process {process}",
            expected=f"one of {sorted(rows)}",
        )
    shares = sorted({tuple(sorted(own)) for own in rows.values()})
    total = math.prod(mesh.shape[axis] for axis in axes)
    if sum(len(share) for share in shares) != total or len({len(x) for x in shares}) > 1:
        raise ArgumentError(
            "processes hold parts of the batch that overlap without being the same",
            got=f"{len(rows)} processes, mesh {dict(mesh.shape)}",
            expected="data * fsdp and the number of processes, one a multiple of the other",
            fix="change data or fsdp",
        )
    return BatchShare(shares.index(tuple(sorted(rows[process]))), len(shares))
