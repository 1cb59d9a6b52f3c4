"""Saves that fail: training goes on, and what was saved stays."""

import errno
import resource
import threading

import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import checkpoint_sample as sample
from xsake.errors import CheckpointError
from xsake.training import checkpointing, verify
from xsake.training.checkpointing import CheckpointStore

LIKE = sample.like()


@pytest.fixture
def watcher():
    return sample.Watcher()


@pytest.fixture
def store(tmp_path, watcher):
    sample.fill(tmp_path, (10,))
    return CheckpointStore(tmp_path, **watcher.options())


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_):
    raise OSError(errno.EIO, "Input/output error")


def test_a_file_that_cannot_grow_fails_the_save_and_nothing_else(tmp_path, store, watcher):
    """A real limit of the system: the write itself is refused, inside of Orbax."""
    large = np.random.default_rng(0).integers(0, 2**32, 2**18, np.uint32)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, hard))
    try:
        store.save(20, sample.tree(20) | {"large": jnp.asarray(large)}, sample.extra(20))
        with pytest.raises(CheckpointError, match="checkpoint 20 was not saved"):
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(f.step, f.is_committed) for f in watcher.failures] == [(20, False)]
    assert [path.name for path in tmp_path.iterdir()] == ["10"]  # no rest that fills the disk
    sample.assert_exact(store.restore(LIKE), 10)
    # Later, with room again, the same store saves the same step.
    store.save(20, sample.tree(20), sample.extra(20))
    store.wait()
    sample.assert_exact(store.restore(LIKE), 20)
    store.close()


@pytest.mark.parametrize("fail", [full, broken])
def test_a_save_that_cannot_begin_is_reported_and_does_not_raise(store, watcher, fail, monkeypatch):
    monkeypatch.setattr(checkpointing, "start_save", fail)
    store.save(20, sample.tree(20), sample.extra(20))
    assert watcher.failures[0].step == 20 and "OSError" in watcher.failures[0].what
    with pytest.raises(CheckpointError) as raised:
        store.wait()
    assert raised.value.code == "XSK-601" and isinstance(raised.value.__cause__, OSError)
    store.wait()  # told once
    sample.assert_exact(store.restore(LIKE), 10)
    store.close()


@pytest.mark.parametrize("fail", [full, broken])
def test_a_save_that_fails_in_the_background_is_reported(store, watcher, fail, monkeypatch):
    monkeypatch.setattr(checkpointing, "start_save", lambda *_: fail)
    store.save(20, sample.tree(20), sample.extra(20))
    store.save(30, sample.tree(30), sample.extra(30))
    with pytest.raises(CheckpointError, match="checkpoint 20 was not saved.*checkpoint 30 was"):
        store.wait()
    assert [failure.step for failure in watcher.failures] == [20, 30]
    assert store.steps() == [10]
    store.close()


def test_a_folder_that_cannot_be_made_is_reported_and_does_not_raise(tmp_path, watcher):
    (tmp_path / "file").write_text("in the way")
    store = CheckpointStore(tmp_path / "file" / "run", **watcher.options())
    store.save(20, sample.tree(20), sample.extra(20))
    assert [(f.step, type(f.error)) for f in watcher.failures] == [(20, NotADirectoryError)]
    with pytest.raises(CheckpointError, match="checkpoint 20 was not saved"):
        store.close()


def test_a_folder_that_orbax_cannot_make_leaves_no_thread_that_waits_for_it(
    tmp_path, watcher, monkeypatch
):
    """A thread that waits for minutes keeps the process alive for as long."""
    folder, begin, before = tmp_path / "steps", checkpointing.start_save, set(threading.enumerate())

    def begin_without_folder(*arguments):
        folder.rmdir()
        folder.write_text("in the way, after all checks")
        return begin(*arguments)

    monkeypatch.setattr(checkpointing, "start_save", begin_without_folder)
    store = CheckpointStore(folder, **watcher.options())
    store.save(20, sample.tree(20), sample.extra(20))
    with pytest.raises(CheckpointError, match="checkpoint 20 was not saved.*Error"):
        store.close()
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(timeout=5)
    assert not [thread for thread in new if thread.is_alive() and not thread.daemon]


def test_an_error_of_the_callback_itself_is_not_lost(tmp_path, monkeypatch):
    def complain(failure):
        raise KeyError(failure.step)

    monkeypatch.setattr(checkpointing, "start_save", lambda *_: full)
    store = CheckpointStore(tmp_path, on_failure=complain)
    store.save(20, sample.tree(20), sample.extra(20))
    with pytest.raises(KeyError, match="20"):
        store.wait()
    with pytest.raises(CheckpointError, match="checkpoint 20 was not saved"):
        store.close()


def test_a_manifest_that_finds_no_room_leaves_a_step_that_is_used(store, watcher, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(verify, "seal", _after(1, verify.seal, full))
        store.save(20, sample.tree(20), sample.extra(20))
        with pytest.raises(CheckpointError, match="checkpoint 20 was committed but not finalized"):
            store.wait()
    assert watcher.failures[0].is_committed and store.steps() == [10, 20]
    sample.assert_exact(store.restore(LIKE), 20)
    assert watcher.reasons == [("repaired", 20, None)]
    store.close()


def test_a_manifest_that_cannot_be_written_later_does_not_stop_a_restore(
    tmp_path, store, watcher, monkeypatch
):
    (tmp_path / "10" / verify.MANIFEST).unlink()
    monkeypatch.setattr(verify, "write_manifest", full)
    sample.assert_exact(store.restore(LIKE), 10)
    assert [(f.step, f.is_committed) for f in watcher.failures] == [(10, True)]


def test_a_step_that_cannot_be_renamed_is_passed_over(tmp_path, store, watcher, monkeypatch):
    sample.fill(tmp_path, (10, 20))
    next((tmp_path / "20" / "state" / "d").iterdir()).write_bytes(b"")
    monkeypatch.setattr(verify, "quarantine", broken)
    sample.assert_exact(store.restore(LIKE), 10)
    assert watcher.reasons == [("skipped", 20, "size")]
    assert "could not be renamed" in watcher.notices[0].detail


def test_a_machine_without_memory_is_no_reason_to_set_steps_aside(store, watcher, monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(checkpointing, "load_arrays", exhausted)
    with pytest.raises(MemoryError):
        store.restore(LIKE)
    assert store.steps() == [10] and not watcher.notices


def test_a_log_is_written_if_nobody_watches(tmp_path, caplog, monkeypatch):
    sample.fill(tmp_path, (10, 20))
    next((tmp_path / "20" / "state" / "d").iterdir()).write_bytes(b"")
    store = CheckpointStore(tmp_path)
    store.restore(LIKE)
    monkeypatch.setattr(checkpointing, "start_save", full)
    store.save(30, sample.tree(30), {})
    assert "checkpoint 20 was quarantined (size, state/d/" in caplog.text
    assert "checkpoint 30 was not saved: OSError" in caplog.text


def _after(calls: int, first, then):
    """`first` for so many calls, `then` from there on."""
    made = []

    def call(*arguments):
        made.append(arguments)
        return (first if len(made) <= calls else then)(*arguments)

    return call
