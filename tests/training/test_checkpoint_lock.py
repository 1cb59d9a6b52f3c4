"""One run per folder: who is refused, whose lock is taken over, and who cleans up."""

import concurrent.futures
import contextlib
import subprocess
import sys
import threading

import pytest

from xsake.errors import ArgumentError
from xsake.training.checkpoints import lock, run_lock


@pytest.fixture
def other():
    """A process that does nothing until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE
    ) as process:
        yield process
        process.kill()


def held_by(folder, **changes) -> lock.Holder:
    found = lock._own().model_copy(update=changes)
    folder.mkdir(exist_ok=True)
    (folder / lock.NAME).write_text(found.model_dump_json())
    return found


def test_a_lock_says_whose_it_is_and_goes_with_its_holder(tmp_path):
    with run_lock(tmp_path / "new") as own:
        assert lock.holder(tmp_path / "new") == own
        assert own.is_alive
    assert lock.holder(tmp_path / "new") is None
    assert not list((tmp_path / "new").iterdir())


def test_a_lock_goes_with_its_holder_when_the_run_fails(tmp_path):
    with pytest.raises(KeyError), run_lock(tmp_path):
        raise KeyError
    assert not list(tmp_path.iterdir())


def test_a_second_run_is_refused_and_the_lock_stays(tmp_path, other):
    found = held_by(tmp_path, pid=other.pid, started=lock._started(other.pid))
    with pytest.raises(ArgumentError, match="another run holds") as raised, run_lock(tmp_path):
        pass
    assert f"process {other.pid} on this machine" in str(raised.value)
    assert lock.holder(tmp_path) == found


def test_the_same_process_does_not_get_a_lock_twice(tmp_path):
    with (
        run_lock(tmp_path) as own,
        pytest.raises(ArgumentError, match="holds the folder already"),
        run_lock(tmp_path),
    ):
        pass
    assert own.is_alive


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, other):
    held_by(tmp_path, pid=other.pid, started=lock._started(other.pid))
    other.kill()
    other.wait()
    with run_lock(tmp_path) as own:
        assert lock.holder(tmp_path) == own


def test_a_process_that_died_and_was_not_buried_does_not_keep_a_folder(tmp_path, other):
    found = held_by(tmp_path, pid=other.pid, started=lock._started(other.pid))
    assert found.is_alive
    other.kill()
    while lock._stat(other.pid)[0] != "Z":
        pass
    assert not found.is_alive


def test_a_number_that_belongs_to_another_process_by_now_does_not_keep_a_folder(tmp_path, other):
    for started in ("another boot 12345", lock._started(other.pid) + "0"):
        held_by(tmp_path, pid=other.pid, started=started)
        with run_lock(tmp_path) as own:
            assert lock.holder(tmp_path) == own


def test_a_number_in_use_keeps_a_folder_if_nobody_knows_when_processes_started(tmp_path, other):
    held_by(tmp_path, pid=other.pid, started=None)
    with pytest.raises(ArgumentError, match="another run holds"), run_lock(tmp_path):
        pass


def test_another_machines_lock_is_refused_unless_it_is_forced(tmp_path):
    found = held_by(tmp_path, host="elsewhere", pid=1)
    with pytest.raises(ArgumentError, match="on another machine") as raised, run_lock(tmp_path):
        pass
    for words in ("process 1 on elsewhere", "is_forced=True", "run.lock"):
        assert words in str(raised.value)
    assert lock.holder(tmp_path) == found
    with run_lock(tmp_path, is_forced=True) as own:
        assert lock.holder(tmp_path) == own


def test_who_lost_the_lock_by_force_does_not_take_it_away(tmp_path):
    with run_lock(tmp_path):
        found = held_by(tmp_path, host="elsewhere", pid=1)
    assert lock.holder(tmp_path) == found


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b'{"pid": "1"}', b"\xff" * 9000])
def test_a_file_that_is_no_lock_is_refused_with_what_to_do(tmp_path, content):
    (tmp_path / lock.NAME).write_bytes(content)
    with pytest.raises(ArgumentError, match="cannot be read") as raised, run_lock(tmp_path):
        pass
    assert "delete" in str(raised.value)


def test_a_link_is_no_lock(tmp_path):
    held_by(tmp_path / "other")
    (tmp_path / lock.NAME).symlink_to(tmp_path / "other" / lock.NAME)
    with pytest.raises(ArgumentError, match="cannot be read"), run_lock(tmp_path):
        pass


def test_of_many_that_find_a_dead_ones_lock_one_gets_it(tmp_path, other):
    held_by(tmp_path, pid=other.pid, started="another boot 1")
    start, end = threading.Barrier(8), threading.Barrier(8)

    def attempt(_) -> bool:
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
        assert sum(pool.map(attempt, range(8))) == 1
