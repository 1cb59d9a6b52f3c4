"""Saves of several processes of which one fails, is slow, or cannot be verified: all agree."""

import os
import socket
import subprocess
import sys
import textwrap

import pytest

GROUP = 4242  # any that has no members

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
    from xsake.training import verify
    from xsake.training.checkpointing import CheckpointStore

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
    store = CheckpointStore(folder, on_event=notices.append, on_failure=failures.append)
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
    """A real ENOSPC: process 0 is in the group that may use the reserved part of the disk."""
    run_two(
        """
        store.save(1, tree(1), {})
        store.wait()
        if number == 1:
            with open(folder.parent / "fill", "wb", buffering=0) as file:
                for size in (2**16, 2**10):
                    try:
                        while True:
                            os.write(file.fileno(), os.urandom(size))
                            os.fsync(file.fileno())
                    except OSError as error:
                        assert error.strerror == "No space left on device"
        meet("full")
        if number == 0:  # there is room for the whole save in the reserved part
            with open(folder.parent / "mine", "wb") as file:
                file.write(os.urandom(2**20))
                file.flush()
                os.fsync(file.fileno())
            os.unlink(folder.parent / "mine")
        meet("not full for process 0")
        began = time.monotonic()
        store.save(2, tree(2), {})
        try:
            store.wait()
            raise AssertionError("a save without one of its halves")
        except CheckpointError:
            pass
        assert time.monotonic() - began < 30
        what = failures.pop().what
        assert "No space left" in what and ("process 1" in what) == (number == 0), what
        meet("failed")
        if number == 1:
            os.unlink(folder.parent / "fill")
        meet("room again")
        store.save(3, tree(3), {})
        store.close()
        assert not failures and store.steps() == [1, 3]
        """,
        reserved_disk / "steps",
        commands=(["setpriv", "--groups", str(GROUP)], []),
    )


def test_a_manifest_may_take_longer_than_a_barrier_of_orbax_waits(tmp_path):
    run_two(
        """
        import orbax.checkpoint.experimental.v1._src.synchronization.multihost as barriers
        barriers._DEFAULT_BARRIER_TIMEOUT = 2  # seconds, and not 300
        write = verify.write_manifest
        def write_slowly(*arguments):
            time.sleep(4)
            return write(*arguments)
        verify.write_manifest = write_slowly
        store.save(1, tree(1), {})
        store.close()
        assert not failures and (folder / "1" / verify.MANIFEST).exists(), failures
        """,
        tmp_path,
    )


def test_each_process_hashes_what_it_wrote_and_verifies_a_share(tmp_path):
    run_two(
        """
        hashed, verified = [], []
        hash_file, digest = verify._hash_and_sync, verify._hash_file
        def hash_and_note(step, path):
            hashed.append(path)
            return hash_file(step, path)
        def digest_and_note(step, path):
            verified.append(path)
            return digest(step, path)
        verify._hash_and_sync, verify._hash_file = hash_and_note, digest_and_note
        for step in (1, 2):
            store.save(step, tree(step), {})
        store.wait()
        manifest = verify.read_manifest(folder / "2")
        verify.verify_files(folder / "2", manifest, "full")
        assert [file.path for file in manifest.files] == sorted(verified)
        assert {path for path in verified if "process_1" in path} and any(
            "process_0" in path for path in verified)
        # Twice, as there are two steps; the names of data files are random.
        assert sum(file.path in hashed for file in manifest.files) == len(hashed) / 2
        assert all(("process_1" in path) == (number == 1) for path in hashed), hashed

        meet("saved")
        verified.clear()
        if number == 0:
            largest = max((folder / "2" / "state" / "ocdbt.process_1" / "d").iterdir(),
                          key=lambda path: path.stat().st_size)
            content = bytearray(largest.read_bytes())
            content[-1] ^= 1
            largest.write_bytes(content)
        meet("damaged")
        assert store.restore(like()).step == 1
        seen = [(notice.kind, notice.step, notice.reason) for notice in notices]
        assert seen == ([("quarantined", 2, "digest")] if number == 0 else []), notices
        shares = multihost_utils.process_allgather(np.int32(len(verified)))
        total = len(manifest.files) + len(verify.read_manifest(folder / "1").files)
        assert shares.sum() == total and abs(shares[0] - shares[1]) <= 2, (shares, total)

        # A process that cannot read back what it wrote fails the save before it is committed.
        if number == 1:
            def fail(*_):
                raise OSError(5, "Input/output error")
            verify.hash_share = fail
        store.save(3, tree(3), {})
        try:
            store.close()
        except CheckpointError as error:
            assert "checkpoint 3 was not saved" in str(error) and "Input/output" in str(error)
        assert store.steps() == [1] and len(failures) == 1
        """,
        tmp_path,
    )
