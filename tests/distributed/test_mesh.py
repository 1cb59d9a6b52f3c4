"""The mesh: sizes that fit or a clear error, neighbours that are near, and who reads which rows."""

import jax
import numpy as np
import pytest

from tests.distributed.devices import FakeDevice, machines
from xsake.distributed.mesh import AXES, BatchShare, MeshShape, batch_share, device_array, make_mesh
from xsake.errors import ArgumentError


def tpu(slices: int = 1) -> list[FakeDevice]:
    """Slices of 4 x 4 chips, 4 chips in a process, numbered line by line."""
    return [
        FakeDevice(
            id=100 * part + 4 * y + x,
            process_index=4 * part + 2 * (y // 2) + x // 2,
            platform="tpu",
            device_kind="TPU v5 lite",
            slice_index=part,
            coords=(x, y, 0),
        )
        for part in range(slices)
        for y in range(4)
        for x in range(4)
    ]


def numbers(devices: np.ndarray) -> list:
    return np.vectorize(lambda device: device.id, otypes=[int])(devices).tolist()


def test_a_mesh_has_all_four_axes_even_for_one_device():
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    assert mesh.axis_names == AXES and mesh.devices.shape == (1, 1, 1, 1)
    assert batch_share(mesh) == BatchShare(0, 1)


def test_a_product_that_is_not_the_number_of_devices_is_refused():
    with pytest.raises(ArgumentError, match="8 devices.*data=2 .* tensor=3 .* = 6") as error:
        device_array(MeshShape(data=2, tensor=3), machines(1, 8))
    assert "product is 8" in str(error.value)
    with pytest.raises(ArgumentError, match="XSK-102.duplicate-devices"):
        device_array(MeshShape(data=2), machines(1, 1) * 2)


@pytest.mark.parametrize("size", [0, -1, True])
def test_a_size_that_is_no_count_is_refused(size):
    with pytest.raises(ArgumentError, match="'tensor' needs a positive integer"):
        MeshShape(tensor=size)


def test_tensor_and_context_neighbours_are_in_one_process():
    mixed = machines(4, 4)[::-1]
    found = device_array(MeshShape(data=2, fsdp=2, tensor=2, context=2), mixed)
    assert numbers(found.reshape(4, 4)) == np.arange(16).reshape(4, 4).tolist()


def test_neighbours_on_a_tpu_are_near_in_its_network():
    found = device_array(MeshShape(data=4, tensor=2, context=2), tpu())
    for group in found.reshape(4, 4):
        places = np.array([device.coords for device in group])
        assert (np.ptp(places, axis=0) <= 3).all() and np.ptp(places, axis=0).sum() <= 3


def test_slices_are_kept_apart_by_the_axes_that_talk_least():
    found = device_array(MeshShape(data=4, tensor=4, context=2), tpu(slices=2))
    slices = np.vectorize(lambda device: device.slice_index)(found)
    assert (slices == slices[:, :, :1, :1]).all() and (
        np.unique(slices[:, 0, 0, 0]) == [0, 1]
    ).all()
    found = device_array(MeshShape(data=1, fsdp=2, tensor=4, context=4), tpu(slices=2))
    slices = np.vectorize(lambda device: device.slice_index)(found)
    assert slices[0, :, 0, 0].tolist() == [0, 1] and (slices == slices[:, :, :1, :1]).all()
    with pytest.raises(ArgumentError, match="XSK-102.slice-crossing"):
        device_array(MeshShape(tensor=32), tpu(slices=2))
    with pytest.raises(ArgumentError, match="slice 0: 16, slice 1: 8"):
        device_array(MeshShape(data=24), tpu(slices=2)[:24])


def shares(shape: MeshShape, processes: int, each: int) -> list[tuple[int, int]]:
    mesh = make_mesh(shape, machines(processes, each))
    return [tuple(batch_share(mesh, process)) for process in range(processes)]


def test_every_process_reads_its_own_rows_when_it_holds_whole_models():
    assert shares(MeshShape(data=4, tensor=2), 2, 4) == [(0, 2), (1, 2)]
    assert shares(MeshShape(data=2, fsdp=4), 4, 2) == [(0, 4), (1, 4), (2, 4), (3, 4)]


def test_processes_that_share_a_model_read_the_same_rows():
    assert shares(MeshShape(data=2, tensor=4), 4, 2) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert shares(MeshShape(context=8), 2, 4) == [(0, 1), (0, 1)]


def test_rows_that_overlap_between_processes_are_refused():
    with pytest.raises(ArgumentError, match="XSK-102.batch-overlap"):
        shares(MeshShape(data=3, tensor=2), 2, 3)


def test_a_process_outside_the_mesh_has_no_rows():
    with pytest.raises(ArgumentError, match="process 7"):
        batch_share(make_mesh(MeshShape(), jax.devices()[:1]), process=7)
