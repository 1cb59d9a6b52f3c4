"""Checkpoints of several processes, of other shardings, and of processes that are killed."""

import os
import random
import signal
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import processes
from tests.training import checkpoint_processes as targets
from tests.training import checkpoint_sample as sample
from xsake.training import verify
from xsake.training.checkpointing import CheckpointStore

LIKE = sample.like()
GROUP = 4242  # any that has no members


def test_a_write_that_fails_on_one_process_fails_the_save_of_both_at_once(tmp_path):
    processes.run(targets.one_cannot_write, tmp_path, processes=2)


def test_two_processes_verify_and_repair_together_and_one_takes_over(tmp_path):
    processes.run(targets.both_verify_and_repair, tmp_path, processes=2)
    like = {"sharded": jax.ShapeDtypeStruct(targets.SHAPE, jnp.uint32)}
    restored = CheckpointStore(tmp_path).restore(like)
    assert restored.step == 2
    np.testing.assert_array_equal(restored.tree["sharded"], targets.values(2))


@pytest.fixture
def reserved_disk(tmp_path):
    """A small real disk of which a group may use the last part and others may not."""
    disk, image = tmp_path / "disk", tmp_path / "image"
    disk.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 2**25)
    options = f"loop,resuid=12345,resgid={GROUP}"
    commands = (
        ["mkfs.ext4", "-q", "-F", "-m", "30", image], ["mount", "-o", options, image, disk]
    )  # fmt: skip
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"mounting a disk needs root and loop devices: {error}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_alone_fails_the_save_of_both(reserved_disk):
    processes.run(targets.one_has_a_full_disk, reserved_disk / "steps", GROUP, processes=2)


def test_eight_devices_share_a_step_otherwise_and_then_one_device_takes_it(tmp_path):
    processes.run(targets.move_between_meshes, tmp_path, devices=8)
    manifest = verify.read_manifest(tmp_path / "explicit" / "3")
    assert manifest.placement.axes == {"data": 4, "tensor": 2}
    assert manifest.placement.devices == 8
    names = ("both", "one", "replicated")
    like = {name: jax.ShapeDtypeStruct((16, 24), jnp.float32) for name in names}
    like["key"] = jax.eval_shape(lambda: jax.random.key(0))
    restored = CheckpointStore(tmp_path / "auto").restore(like)
    expected = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
    for name in names:
        np.testing.assert_array_equal(restored.tree[name], expected)
    assert sample.bits(restored.tree["key"]) == sample.bits(jax.random.key(5))
    assert restored.extra == {"from": "eight"}


def kill_at(folder, moment):
    """Kill a run while it saves, and restore its newest step with a final name, exactly."""
    child = processes.start(targets.save_and_die, folder, moment)
    if isinstance(moment, float):
        while not (folder / "2").exists():
            assert child.is_alive(), "the run ended by itself"
            time.sleep(0.01)
        time.sleep(moment)
        child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    newest = max(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    watcher = sample.Watcher()
    store = CheckpointStore(folder, max_to_keep=2, **watcher.options())
    sample.assert_exact(store.restore(LIKE), newest)
    store.save(newest + 1, sample.tree(newest + 1), sample.extra(newest + 1))
    store.close()
    sample.assert_exact(CheckpointStore(folder).restore(LIKE), newest + 1)
    assert all(path.name.isdecimal() for path in folder.iterdir())
    return newest, [event.kind for event in watcher.notices]


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("before the commit", (2, [])),
        ("before the manifest", (3, ["repaired"])),
        ("in the manifest", (3, ["repaired"])),
        ("while deleting", (3, [])),
        (0.1, None),
    ],
)
def test_a_run_that_is_killed_at_any_moment_restores_its_newest_committed_step(
    tmp_path, moment, expected
):
    restored = kill_at(tmp_path, moment)
    assert restored == expected or (expected is None and set(restored[1]) <= {"repaired"})


@pytest.mark.slow
def test_twenty_runs_that_are_killed_at_random_moments_restore_their_newest_step(tmp_path):
    drawn = random.Random(0)
    for number in range(20):
        _, kinds = kill_at(tmp_path / str(number), drawn.uniform(0.0, 2.0))
        assert set(kinds) <= {"repaired"}
