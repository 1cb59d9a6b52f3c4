"""Checkpoints of several processes, of other shardings, and of processes that are killed."""

import signal
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


def test_a_write_that_fails_on_one_process_fails_the_save_of_both_at_once(tmp_path):
    processes.run(targets.one_cannot_write, tmp_path, processes=2)


def test_two_processes_verify_and_repair_together_and_one_takes_over(tmp_path):
    processes.run(targets.both_verify_and_repair, tmp_path, processes=2)
    like = {"sharded": jax.ShapeDtypeStruct(targets.SHAPE, jnp.uint32)}
    restored = CheckpointStore(tmp_path).restore(like)
    assert restored.step == 2
    np.testing.assert_array_equal(restored.tree["sharded"], targets.values(2))


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
    notices = []
    store = CheckpointStore(folder, max_to_keep=2, on_event=notices.append)
    sample.assert_exact(store.restore(LIKE), newest)
    store.save(newest + 1, sample.tree(newest + 1), sample.extra(newest + 1))
    store.close()
    sample.assert_exact(CheckpointStore(folder).restore(LIKE), newest + 1)
    assert all(path.name.isdecimal() for path in folder.iterdir())
    return newest, [event.kind for event in notices]


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
