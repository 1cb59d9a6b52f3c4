"""One run per folder: who is refused, whose lock is taken over, and who cleans up."""

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from xsake.errors import ArgumentError
from xsake.training import lock
from xsake.training.lock import run_lock

OLD = {"namespace": None, "token": None, "lease_seconds": None}  # what 0.1.0 does not know
FOREIGN = {"host": "elsewhere", "pid": 1, "started": "another-boot 5", "namespace": "pid:[1]"}
HOLD = """
import sys, time
from pathlib import Path
from xsake.training.lock import run_lock
with run_lock(Path(sys.argv[1]), lease_seconds=float(sys.argv[2])) as lease:
    print("holds", flush=True)
    while True:
        time.sleep(0.05)
        lease.require()
"""


@pytest.fixture
def other():
    """A process that does nothing until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def held_by(folder, **changes) -> lock.LockHolder:
    found = lock.LockHolder.current(60.0).model_copy(update=changes)
    folder.mkdir(exist_ok=True)
    written = found.model_dump(exclude=set(OLD) | {"beat"} if found.token is None else set())
    (folder / lock.NAME).write_text(json.dumps(written))
    return found


def attempt(folder, seconds=60.0, **options):
    """Take and give back a lock within so many seconds; lines that it reported."""
    lines = []
    began = time.monotonic()
    with run_lock(folder, report=lines.append, **options) as lease:
        assert lock.read_holder(folder) == lease.holder
    assert time.monotonic() - began < seconds
    return lines


@contextlib.contextmanager
def held_apart(folder, lease_seconds, *unshared):
    """A live process that holds a folder, in namespaces of its own."""
    pre = ["unshare", *unshared, "--fork", "--kill-child"] if unshared else []
    if pre and subprocess.run([*pre, "true"], check=False, capture_output=True).returncode:
        pytest.skip(f"unshare {' '.join(unshared)} is not permitted here")
    with subprocess.Popen(
        [*pre, sys.executable, "-c", HOLD, str(folder), str(lease_seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout.readline() == "holds\n", process.stderr.read()
            yield process
        finally:
            process.kill()


def test_a_lock_says_whose_it_is_and_goes_with_its_holder(tmp_path):
    with run_lock(tmp_path / "new") as lease:
        assert lock.read_holder(tmp_path / "new") == lease.holder
        assert lease.holder.is_comparable and lease.holder.is_alive
        lease.require()
        lease.require(reread=True)
    assert lock.read_holder(tmp_path / "new") is None
    with pytest.raises(KeyError), run_lock(tmp_path / "new"):
        raise KeyError
    assert not list((tmp_path / "new").iterdir())


def test_a_second_run_is_refused_and_the_lock_stays(tmp_path, other):
    found = held_by(tmp_path, pid=other.pid, started=lock.process_start(other.pid))
    with pytest.raises(ArgumentError, match="another run holds") as raised, run_lock(tmp_path):
        pass
    assert f"process {other.pid} on this host" in str(raised.value)
    assert lock.read_holder(tmp_path) == found


def test_the_same_process_does_not_get_a_lock_twice(tmp_path):
    with (
        run_lock(tmp_path) as lease,
        pytest.raises(ArgumentError, match="already holds the folder"),
        run_lock(tmp_path),
    ):
        pass
    assert lease.holder.is_alive


def test_a_process_that_died_and_was_not_buried_does_not_keep_a_folder(tmp_path, other):
    found = held_by(tmp_path, pid=other.pid, started=lock.process_start(other.pid))
    assert found.is_alive
    other.kill()
    while lock.read_proc_stat(other.pid)[0] != "Z":
        pass
    assert not found.is_alive
    assert attempt(tmp_path, 5.0) == []  # at once
    other.wait()
    held_by(tmp_path, pid=found.pid, started=found.started)
    assert attempt(tmp_path, 5.0) == []
    # The number of a process that runs, but started later.
    held_by(tmp_path, pid=os.getpid(), started=lock.process_start(os.getpid()) + "0")
    assert attempt(tmp_path, 5.0) == []


def test_a_lock_of_0_1_0_on_this_machine_is_understood(tmp_path, other):
    for started in ("another boot 12345", lock.process_start(other.pid) + "0"):
        held_by(tmp_path, pid=other.pid, started=started, **OLD)
        assert attempt(tmp_path, 5.0) == []
    for started in (None, lock.process_start(other.pid)):
        found = held_by(tmp_path, pid=other.pid, started=started, **OLD)
        assert lock.read_holder(tmp_path) == found
        with pytest.raises(ArgumentError, match="another run holds"):
            attempt(tmp_path)


def test_a_lock_of_0_1_0_on_another_machine_is_refused_unless_it_is_forced(tmp_path):
    found = held_by(tmp_path, host="elsewhere", pid=1, **OLD)
    with pytest.raises(ArgumentError, match="XSK-102.folder-held-elsewhere") as raised:
        attempt(tmp_path)
    for words in ("process 1 on elsewhere", "--take-lock", "run.lock"):
        assert words in str(raised.value)
    assert lock.read_holder(tmp_path) == found
    assert attempt(tmp_path, 5.0, is_forced=True) == []


def test_a_lease_without_a_beat_is_taken_over_and_the_wait_is_reported(tmp_path):
    held_by(tmp_path, **FOREIGN, lease_seconds=1.0)
    began = time.monotonic()
    first, last = attempt(tmp_path)
    assert time.monotonic() - began >= 1.0
    assert first.startswith(f"process 1 on elsewhere holds {tmp_path} and may be dead: waiting 1 s")
    assert last.endswith("had no heartbeat for 1 s: taking over the run")
    held_by(tmp_path, **FOREIGN)
    assert attempt(tmp_path, 5.0, is_forced=True) == []  # at once, by force
    # Another boot with the same host name may be another machine.
    held_by(tmp_path, pid=os.getpid(), started="another-boot 5", lease_seconds=0.5)
    assert len(attempt(tmp_path)) == 2


def test_a_holder_that_beats_is_refused_wherever_it_is(tmp_path):
    found = held_by(tmp_path, **FOREIGN, lease_seconds=30.0)
    beat = lambda _: (tmp_path / lock.NAME).write_bytes(found.next_beat().encode())
    with (
        pytest.raises(ArgumentError, match="another run holds") as raised,
        run_lock(tmp_path, report=beat),
    ):
        pass
    assert "process 1 on elsewhere" in str(raised.value)


def test_a_lock_that_is_given_back_while_it_is_watched_is_free(tmp_path):
    held_by(tmp_path, **FOREIGN, lease_seconds=30.0)
    began = time.monotonic()
    with run_lock(tmp_path, report=lambda _: (tmp_path / lock.NAME).unlink()):
        assert time.monotonic() - began < 5


def test_a_live_container_of_the_same_host_name_is_not_robbed(tmp_path):
    with held_apart(tmp_path, 2.0, "--pid", "--mount-proc") as process:
        found = lock.read_holder(tmp_path)
        assert found.pid == 1 and not found.is_comparable
        assert found.started.split()[0] == lock.boot_id()
        with pytest.raises(ArgumentError, match="another run holds"):
            attempt(tmp_path)
        assert process.poll() is None and found.is_same(lock.read_holder(tmp_path))


def test_a_run_goes_on_elsewhere_after_its_node_died(tmp_path):
    with held_apart(tmp_path, 1.0, "--pid", "--mount-proc", "--uts"):
        pass
    found = lock.read_holder(tmp_path)
    assert found is not None  # a node that died gave nothing back
    assert len(attempt(tmp_path)) == 2


def test_a_machine_that_was_renamed_knows_its_own_dead(tmp_path):
    with held_apart(tmp_path, 30.0) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    found = lock.read_holder(tmp_path)
    (tmp_path / lock.NAME).write_bytes(found.model_copy(update={"host": "node-a"}).encode())
    assert attempt(tmp_path, 5.0) == []


def test_a_holder_that_was_suspended_beyond_its_lease_stops(tmp_path):
    with held_apart(tmp_path, 1.0, "--pid", "--mount-proc") as process:
        # The child of unshare: signals to unshare itself do not reach it.
        child = int(subprocess.check_output(["pgrep", "-P", str(process.pid)]))
        os.kill(child, signal.SIGSTOP)
        with run_lock(tmp_path, lease_seconds=1.0, report=lambda _: None) as lease:
            os.kill(child, signal.SIGCONT)
            assert process.wait(timeout=20) != 0
            lease.require(reread=True)
            assert lease.holder.is_same(lock.read_holder(tmp_path))
        assert "another run has taken the folder of this run" in process.stderr.read()


def test_a_lock_is_renewed_and_one_that_was_deleted_comes_back(tmp_path):
    with run_lock(tmp_path, lease_seconds=0.4) as lease:
        first = lease.holder.beat
        while lock.read_holder(tmp_path).beat == first:
            time.sleep(0.01)
        (tmp_path / lock.NAME).unlink()
        while lock.read_holder(tmp_path) is None:
            time.sleep(0.01)
        lease.require(reread=True)
    assert not list(tmp_path.iterdir())


def test_a_file_keeps_its_size_at_every_beat():
    own = lock.LockHolder.current(60.0)
    assert len(own.next_beat().encode()) == len(own.encode()) <= lock.MAX_BYTES
    last = own.model_copy(update={"beat": "9" * 12})
    assert last.next_beat().beat == "0" * 12


def test_a_beat_after_a_takeover_does_not_overwrite_the_new_holder(tmp_path):
    with run_lock(tmp_path) as lease:
        found = held_by(tmp_path, **FOREIGN)
        with pytest.raises(lock.LeaseLostError, match="process 1 on elsewhere"):
            lease.require(reread=True)
        with pytest.raises(lock.LeaseLostError):
            lease.require()
    assert lock.read_holder(tmp_path) == found


def test_of_two_machines_that_take_over_at_once_the_last_one_wins(tmp_path, monkeypatch):
    held_by(tmp_path, **FOREIGN, lease_seconds=0.5)
    create = lock._create

    def create_and_lose(path, own):
        create(path, own)
        held_by(tmp_path, **{**FOREIGN, "host": "third"})

    monkeypatch.setattr(lock, "_create", create_and_lose)
    with pytest.raises(ArgumentError, match="XSK-102.lock-race"):
        attempt(tmp_path)
    assert lock.read_holder(tmp_path).host == "third"


@pytest.mark.parametrize("seconds", [0.0, -1.0, 3601.0, float("nan")])
def test_a_lease_has_a_length(tmp_path, seconds):
    with (
        pytest.raises(ArgumentError, match="XSK-102.lease"),
        run_lock(tmp_path, lease_seconds=seconds),
    ):
        pass


@pytest.mark.parametrize("content", [b"{", b"{}", b'{"pid": "1"}', b"\xff" * 9000])
def test_a_file_that_is_no_lock_is_refused_with_what_to_do(tmp_path, content):
    (tmp_path / lock.NAME).write_bytes(content)
    with (
        pytest.raises(ArgumentError, match="XSK-102.lock-unreadable") as raised,
        run_lock(tmp_path),
    ):
        pass
    assert "delete" in str(raised.value)


def test_an_empty_file_is_the_lock_of_a_process_that_died_as_it_created_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "LEASE_SECONDS", 0.5)
    (tmp_path / lock.NAME).touch()
    assert len(attempt(tmp_path, lease_seconds=0.5)) == 2


def test_a_link_is_no_lock(tmp_path):
    held_by(tmp_path / "other")
    (tmp_path / lock.NAME).symlink_to(tmp_path / "other" / lock.NAME)
    with pytest.raises(ArgumentError, match="XSK-102.lock-unreadable"), run_lock(tmp_path):
        pass


def test_of_many_that_find_a_dead_ones_lock_one_gets_it(tmp_path, other):
    held_by(tmp_path, pid=other.pid, started=lock.process_start(other.pid) + "0")
    start, end = threading.Barrier(8), threading.Barrier(8)

    def take(_) -> bool:
        start.wait()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(run_lock(tmp_path))
                is_held = True
            except ArgumentError:
                is_held = False
            end.wait()
            return is_held

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(take, range(8))) == 1
