"""Targets of `tests.processes.run` that save and restore checkpoints; no arrays at import."""

import os
import pathlib
import resource
import signal
import time

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from xsake.errors import CheckpointError
from xsake.training import checkpointing, verify
from xsake.training.checkpointing import CheckpointStore
from xsake.training.fingerprints import find_mismatches

SHAPE = (2, 2**16)
meet = multihost_utils.sync_global_devices


def values(step):
    return np.random.default_rng(step).integers(0, 2**32, SHAPE, np.uint32)


def place():
    return NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))


def tree(step):
    array = values(step)
    return {"sharded": jax.make_array_from_callback(SHAPE, place(), array.__getitem__)}


def restore(store, *step):
    return store.restore(
        {"sharded": jax.ShapeDtypeStruct(SHAPE, np.uint32, sharding=place())}, *step
    )


class Pair:
    """The store of one of two processes, with what it reports."""

    def __init__(self, folder):
        self.rank, self.folder = jax.process_index(), folder
        self.events = []
        self.store = CheckpointStore(folder, on_event=self.events.append)

    def save(self, step):
        self.store.save(step, tree(step), {"step": step})

    def fail_to_save(self, step, seconds=30):
        """Save a step that fails within `seconds`; return the reason."""
        began = time.monotonic()
        self.save(step)
        meet(f"training continues {step}")  # before the save has ended
        with pytest.raises(CheckpointError, match=f"checkpoint {step} was not saved") as raised:
            self.store.wait()
        assert time.monotonic() - began < seconds
        meet(f"failed {step}")
        assert step not in self.store.steps()
        return str(raised.value)


def limit_file_size(size):
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def one_cannot_write(folder):
    """A real limit of the system, on one of the two: the write itself is refused."""
    pair = Pair(folder)
    pair.save(1)
    pair.store.wait()
    for failing in (1, 0):
        first = 10 * (2 - failing)
        limit_file_size(4096 if pair.rank == failing else None)
        what = pair.fail_to_save(first)
        assert "File too large" in what, what
        assert (f"process {failing}" in what) == (pair.rank != failing), what
        limit_file_size(None)
        pair.save(first + 1)
        pair.store.wait()
        # At the latest now: threads of the failed save may have been writing while it was removed.
        assert not list(folder.glob("*tmp*"))
    assert pair.store.steps() == [1, 11, 21]
    assert restore(pair.store).step == 21 and not pair.events
    pair.store.close()


def both_verify_and_repair(folder):
    """Each process hashes what it wrote, verifies a share, and follows the other's judgement."""
    import orbax.checkpoint.experimental.v1._src.synchronization.multihost as barriers

    barriers._DEFAULT_BARRIER_TIMEOUT = 2  # seconds, and not 300: a manifest may take longer
    hashed, verified, write = [], [], verify.write_manifest
    hash_file, digest = verify._hash_and_sync, verify._hash_file
    verify._hash_and_sync = lambda step, path: (hashed.append(path), hash_file(step, path))[1]
    verify._hash_file = lambda step, path: (verified.append(path), digest(step, path))[1]
    verify.write_manifest = lambda *given: (time.sleep(1.5), write(*given))[1]
    pair = Pair(folder)
    for step in (1, 2, 3):
        pair.save(step)
    pair.save(3)
    pair.store.wait()
    assert pair.store.steps() == [1, 2, 3]
    manifest = verify.read_manifest(folder / "3")
    # Three times, as there are three steps; the names of data files are random.
    assert sum(file.path in hashed for file in manifest.files) == len(hashed) / 3
    assert all(("process_1" in path) == (pair.rank == 1) for path in hashed), hashed
    assert manifest.placement.processes == 2

    meet("saved")
    if pair.rank == 0:
        parts = (folder / "3" / "state" / "ocdbt.process_1" / "d").iterdir()
        largest = max(parts, key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[-1] ^= 1
        largest.write_bytes(content)
        (folder / "2" / verify.MANIFEST).unlink()
    meet("damaged")
    restored = restore(pair.store)
    assert (restored.step, restored.extra) == (2, {"step": 2})
    for shard in restored.tree["sharded"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values(2)[shard.index])
    seen = [(event.kind, event.step, event.reason) for event in pair.events]
    expected = [("quarantined", 3, "digest"), ("repaired", 2, None)] if pair.rank == 0 else []
    assert seen == expected, seen
    shares = multihost_utils.process_allgather(np.int32(len(verified)))
    assert shares.sum() == len(manifest.files) and abs(shares[0] - shares[1]) <= 1, shares
    meet("restored")
    assert (folder / "2" / verify.MANIFEST).exists() and pair.store.steps() == [1, 2]
    try:
        restore(pair.store, 7)
    except CheckpointError as error:
        assert "step 7 cannot be restored" in str(error)

    # A process that cannot read back what it wrote fails the save before it is committed.
    if pair.rank == 1:

        def fail(*_):
            raise OSError(5, "Input/output error")

        verify.hash_share = fail
    assert "Input/output" in pair.fail_to_save(4)
    pair.store.close()


def move_between_meshes(folder):
    """Eight devices restore what they saved under other shardings."""
    devices = np.array(jax.devices())
    assert devices.size == 8
    for name, kind in (("auto", AxisType.Auto), ("explicit", AxisType.Explicit)):
        mesh = lambda *shape, kind=kind: Mesh(
            devices.reshape(shape), ("data", "tensor"), axis_types=(kind,) * 2
        )
        first, second = mesh(4, 2), mesh(2, 4)
        array = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
        saved = {
            "both": NamedSharding(first, P("data", "tensor")),
            "one": NamedSharding(first, P("data")),
            "replicated": NamedSharding(first, P()),
        }
        tree = {name: jax.device_put(array, sharding) for name, sharding in saved.items()}
        tree["key"] = jax.device_put(jax.random.key(5), NamedSharding(first, P()))
        store = CheckpointStore(folder / name)
        store.save(3, tree, {"from": "eight"})
        other = {
            "both": NamedSharding(second, P("tensor", "data")),
            "one": NamedSharding(second, P(None, ("data", "tensor"))),
            "replicated": SingleDeviceSharding(devices[5]),
            "key": NamedSharding(second, P()),
        }
        like = {
            name: jax.ShapeDtypeStruct(tree[name].shape, tree[name].dtype, sharding=sharding)
            for name, sharding in other.items()
        }
        restored = store.restore(like).tree
        for name, sharding in other.items():
            assert restored[name].sharding == sharding, name
            if name != "key":
                np.testing.assert_array_equal(np.asarray(restored[name]), array)
        words = [np.asarray(jax.random.key_data(each["key"])) for each in (restored, tree)]
        np.testing.assert_array_equal(*words)
        store.close()


def find_broken_replicas():
    """A flipped bit on some of eight devices is found, with the devices that hold it."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    ids = [device.id for device in mesh.devices.flat]

    def put(spec, *broken):
        sharding, parts = NamedSharding(mesh, spec), []
        for device, index in sharding.addressable_devices_indices_map(array.shape).items():
            part = array[index].copy()
            if device.id in broken:
                part.reshape(-1).view(np.uint32)[1] ^= 1 << 30
            parts.append(jax.device_put(part, device))
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

    def find(**tree):
        return [
            (each.leaf, [copy.device for copy in each.suspects], each.copies, each.is_decided)
            for each in find_mismatches(tree)
        ]

    everywhere, by_model, by_all = P(), P(None, "model"), P("data", "model")
    assert find(a=put(everywhere), b=put(by_model), c=put(by_all)) == []
    assert find(a=put(everywhere), b=put(everywhere, ids[5])) == [("b", [ids[5]], 8, True)]
    # Column halves: devices of even and odd position hold different ones, four copies each.
    assert find(b=put(by_model, ids[3])) == [("b", [ids[3]], 4, True)]
    assert find(b=put(by_model, ids[1], ids[3])) == [("b", ids[1::2], 4, False)]
    assert find(c=put(by_all, ids[2])) == []  # exists once
    assert find(k=jax.device_put(jax.random.key(3), NamedSharding(mesh, P()))) == []


def save_and_die(folder, moment):
    """Save step after step until this process is killed, at a moment of step 3 if it has a name."""
    from tests.training import checkpoint_sample as sample

    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    at_3 = lambda real: lambda path, *rest: die() if path.name == "3" else real(path, *rest)
    if moment == "before the commit":
        checkpointing.start_save = at_3(checkpointing.start_save)
    if moment == "before the manifest":
        verify.write_manifest = at_3(verify.write_manifest)
    if moment == "in the manifest":
        replace = pathlib.Path.replace
        pathlib.Path.replace = lambda self, target: (
            die() if self.name == ".3.manifest" else replace(self, target)
        )
    if moment == "while deleting":
        verify.shutil.rmtree = lambda path, **_: die() if path.exists() else None
    store = CheckpointStore(folder, max_to_keep=2)
    for step in range(1, 10_000):
        store.save(step, sample.tree(step), sample.extra(step))
