"""Checkpoints that move: other shardings, other numbers of devices, other numbers of processes."""

import os
import socket
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import checkpoint_sample as sample
from xsake.training import verify
from xsake.training.checkpointing import CheckpointStore

SHAPE = (16, 24)

EIGHT_DEVICES = textwrap.dedent("""
    import pathlib, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
    from xsake.training.checkpointing import CheckpointStore

    def move(folder, kind):
        devices = np.array(jax.devices())
        assert devices.size == 8
        first = Mesh(devices.reshape(4, 2), ("data", "tensor"), axis_types=(kind,) * 2)
        second = Mesh(devices.reshape(2, 4), ("data", "tensor"), axis_types=(kind,) * 2)
        values = np.random.default_rng(0).normal(size=(16, 24)).astype(np.float32)
        places = {
            "both": NamedSharding(first, P("data", "tensor")),
            "one": NamedSharding(first, P("data")),
            "replicated": NamedSharding(first, P()),
        }
        tree = {name: jax.device_put(values, place) for name, place in places.items()}
        tree["key"] = jax.device_put(jax.random.key(5), NamedSharding(first, P()))
        store = CheckpointStore(folder)
        store.save(3, tree, {"from": "eight"})
        others = {
            "both": NamedSharding(second, P("tensor", "data")),
            "one": NamedSharding(second, P(None, ("data", "tensor"))),
            "replicated": jax.sharding.SingleDeviceSharding(devices[5]),
            "key": NamedSharding(second, P()),
        }
        like = {name: jax.ShapeDtypeStruct(tree[name].shape, tree[name].dtype, sharding=place)
                for name, place in others.items()}
        restored = store.restore(like)
        for name, place in others.items():
            assert restored.tree[name].sharding == place, name
            if name != "key":
                np.testing.assert_array_equal(np.asarray(restored.tree[name]), values)
        words = [np.asarray(jax.random.key_data(found["key"])) for found in (restored.tree, tree)]
        np.testing.assert_array_equal(*words)
        store.close()

    for name, kind in (("auto", AxisType.Auto), ("explicit", AxisType.Explicit)):
        move(pathlib.Path(sys.argv[1], name), kind)
    print("moved")
""")


def test_eight_devices_share_a_step_otherwise_and_then_one_device_takes_it(tmp_path):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, str(tmp_path)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "moved" in done.stdout, done.stderr[-3000:]
    manifest = verify.read_manifest(tmp_path / "explicit" / "3")
    assert manifest.placement.axes == {"data": 4, "tensor": 2}
    assert manifest.placement.devices == 8
    like = {
        name: jax.ShapeDtypeStruct(SHAPE, jnp.float32) for name in ("both", "one", "replicated")
    }
    like["key"] = jax.eval_shape(lambda: jax.random.key(0))
    restored = CheckpointStore(tmp_path / "auto").restore(like)
    expected = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    for name in ("both", "one", "replicated"):
        np.testing.assert_array_equal(restored.tree[name], expected)
    assert sample.bits(restored.tree["key"]) == sample.bits(jax.random.key(5))
    assert restored.extra == {"from": "eight"}


TWO_PROCESSES = textwrap.dedent("""
    import pathlib, sys
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[3])
    jax.distributed.initialize(sys.argv[2], 2, number)
    import jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from xsake.errors import CheckpointError
    from xsake.training.checkpointing import CheckpointStore

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharded, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def tree(step):
        values = np.random.default_rng(step).normal(size=(16, 24)).astype(np.float32)
        made = lambda place: jax.make_array_from_callback(values.shape, place, values.__getitem__)
        return {"sharded": made(sharded), "everywhere": made(everywhere)}

    notices, failures = [], []
    store = CheckpointStore(folder, on_event=notices.append, on_failure=failures.append)
    for step in (1, 2, 3):
        store.save(step, tree(step), {"step": step})
    store.save(3, tree(3), {"step": 3})
    store.wait()
    assert not failures, failures
    # Whoever returns from `wait` finds the manifest, on every process.
    assert store.steps() == [1, 2, 3] and (folder / "3" / "MANIFEST.json").exists()
    if number == 0:
        data = next((folder / "3" / "state").rglob("d/*"))
        content = bytearray(data.read_bytes())
        content[-1] ^= 1
        data.write_bytes(content)
        (folder / "2" / "MANIFEST.json").unlink()
    from jax.experimental import multihost_utils
    multihost_utils.sync_global_devices("damaged")
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
                        tree(0))
    restored = store.restore(like)
    assert (restored.step, restored.extra) == (2, {"step": 2})
    for name, leaf in tree(2).items():
        for own, expected in zip(restored.tree[name].addressable_shards, leaf.addressable_shards):
            np.testing.assert_array_equal(np.asarray(own.data), np.asarray(expected.data))
    multihost_utils.sync_global_devices("restored")
    assert (folder / "2" / "MANIFEST.json").exists() and store.steps() == [1, 2]
    kinds = [notice.kind for notice in notices]
    assert kinds == (["quarantined", "repaired"] if number == 0 else []), kinds
    try:
        store.restore(like, 7)
    except CheckpointError as error:
        assert "step 7 cannot be restored" in str(error)
    store.close()
    print("two agree")
""")


@pytest.mark.slow
def test_two_processes_save_judge_and_restore_together_and_one_takes_over(tmp_path):
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, str(tmp_path), address, str(number)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        for run in runs:
            out, wrong = run.communicate(timeout=1500)
            assert "two agree" in out, wrong[-3000:]
    finally:
        for run in runs:
            run.kill()
            run.wait()
    like = {name: jax.ShapeDtypeStruct(SHAPE, jnp.float32) for name in ("sharded", "everywhere")}
    restored = CheckpointStore(tmp_path).restore(like)
    expected = np.random.default_rng(2).normal(size=SHAPE).astype(np.float32)
    assert restored.step == 2
    for found in restored.tree.values():
        np.testing.assert_array_equal(found, expected)
    assert verify.read_manifest(tmp_path / "1").placement.processes == 2
