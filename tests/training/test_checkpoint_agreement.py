"""Saves of several processes of which one fails, is slow, or cannot be verified: all agree."""

import os
import socket
import subprocess
import sys
import textwrap

PROLOGUE = textwrap.dedent("""
    import json, os, pathlib, resource, sys, threading, time
    import jax
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    folder, number = pathlib.Path(sys.argv[1]), int(sys.argv[3])
    jax.distributed.initialize(sys.argv[2], 2, number)
    import numpy as np
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    from xsake.errors import CheckpointError
    from xsake.training.checkpoints import CheckpointStore, orbax_io
    from xsake.training.checkpoints import manifest as manifests

    place = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), P("data"))

    def tree(step):
        values = np.random.default_rng(step).integers(0, 2**32, (2, 2**16), np.uint32)
        return {"sharded": jax.make_array_from_callback(values.shape, place, values.__getitem__)}

    def like():
        return {"sharded": jax.ShapeDtypeStruct((2, 2**16), np.uint32, sharding=place)}

    def limit_file_size(size):
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))

    def meet(name):
        multihost_utils.sync_global_devices(name)

    notices, failures = [], []
    store = CheckpointStore(folder, watch=notices.append, on_failure=failures.append)
""")


def run_two(script, folder, *, seconds=150, commands=((), ())) -> list[str]:
    """Run a script as two processes and return what each printed; both must end with code 0."""
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{chosen.getsockname()[1]}"
    text = PROLOGUE + textwrap.dedent(script)
    pair = [
        subprocess.Popen(
            [*commands[number], sys.executable, "-c", text, str(folder), address, str(number)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=seconds) for process in pair]
    finally:
        for process in pair:
            process.kill()
            process.wait()
    for process, (_, wrong) in zip(pair, ended, strict=True):
        assert process.returncode == 0, wrong[-3000:]
    return [out for out, _ in ended]


def test_a_write_that_fails_on_one_process_fails_the_save_of_both_at_once(tmp_path):
    """A real limit of the system, on one of the two: the write itself is refused."""
    run_two(
        """
        store.save(1, tree(1), {})
        store.wait()
        for failing in (1, 0):
            first = 10 * (2 - failing)
            if number == failing:
                limit_file_size(4096)
            began = time.monotonic()
            store.save(first, tree(first), {})
            meet(f"training continues {failing}")  # before the save has ended
            try:
                store.wait()
                raise AssertionError("a save without one of its halves")
            except CheckpointError as error:
                assert f"checkpoint {first} was not saved" in str(error), error
            seconds = time.monotonic() - began
            assert seconds < 30, seconds
            assert [(each.step, each.is_committed) for each in failures] == [(first, False)]
            what = failures.pop().what
            assert "File too large" in what, what
            assert (f"process {failing}" in what) == (number != failing), what
            limit_file_size(None)
            meet(f"failed {failing}")
            assert not list(folder.glob("*tmp*")) and first not in store.steps()
            store.save(first + 1, tree(first + 1), {})
            store.wait()
        assert not failures and store.steps() == [1, 11, 21], (failures, store.steps())
        assert store.restore(like()).step == 21 and not notices
        store.close()
        """,
        tmp_path,
    )
