"""Checkpoints: restored exactly or not at all; saves that fail leave the older steps."""

import errno
import gc
import json
import random
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.training import checkpoint_sample as sample
from xsake.errors import ArgumentError, CheckpointError
from xsake.training import checkpointing, verify
from xsake.training.checkpointing import CheckpointStore, SaveFailure
from xsake.training.metrics_logger import SaveFailureCounter

LIKE = sample.like()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    sample.fill(folder)
    return folder


@pytest.fixture
def folder(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


@pytest.fixture
def watcher():
    return sample.Watcher()


def files_of(folder, step=30):
    return sorted(path for path in (folder / str(step)).rglob("*") if path.is_file())


def metadata_of(folder, step):
    return folder / str(step) / "_CHECKPOINT_METADATA"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back_bit_for_bit(folder):
    store = CheckpointStore(folder)
    assert store.steps() == [10, 20, 30]
    sample.assert_exact(store.restore(LIKE), 30)
    sample.assert_exact(store.restore(LIKE, 10), 10)
    part = store.restore(LIKE["parameters"], part="parameters").tree
    expected = sample.tree(30)["parameters"]
    assert jax.tree.map(sample.bits, part) == jax.tree.map(sample.bits, expected)
    assert names(folder) == ["10", "20", "30"]
    manifest = verify.read_manifest(folder / "30")
    assert [leaf.name for leaf in manifest.leaves][:2] == ["key", "optimizer/0"]
    assert manifest.placement.platform == "cpu" and manifest.versions.keys() >= {"jax", "xsake"}
    store.close()


def test_arrays_may_be_donated_as_soon_as_save_returns(tmp_path):
    store = CheckpointStore(tmp_path)
    value = jnp.arange(2**18, dtype=jnp.float32)
    expected = np.array(value)
    overwrite = jax.jit(lambda x: -x - 1, donate_argnums=0)
    store.save(1, {"value": value}, {})
    for _ in range(4):
        value = overwrite(value)
    value.block_until_ready()
    store.wait()
    restored = store.restore({"value": jax.ShapeDtypeStruct(expected.shape, jnp.float32)})
    np.testing.assert_array_equal(restored.tree["value"], expected)
    store.close()


def test_thirty_flipped_bits_are_all_noticed(folder, watcher):
    drawn = random.Random(0)
    files = files_of(folder)
    assert len(files) >= 10
    for number in range(30):
        path = files[number % len(files)]
        while not path.stat().st_size:
            path = drawn.choice(files)
        content = bytearray(path.read_bytes())
        good = bytes(content)
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        path.write_bytes(content)
        store = CheckpointStore(folder, **watcher.options())
        sample.assert_exact(store.restore(LIKE), 20)
        notice = watcher.notices[-1]
        assert (notice.kind, notice.step) == ("quarantined", 30)
        assert notice.path.is_dir() and str(path.relative_to(folder / "30")) in notice.detail
        notice.path.rename(folder / "30")
        path.write_bytes(good)
    assert len(watcher.notices) == 30
    sample.assert_exact(CheckpointStore(folder).restore(LIKE), 30)


@pytest.fixture
def failing_loads():
    """A load that fails leaves tasks of Orbax behind, which complain when they are collected."""
    yield
    gc.collect()


@pytest.mark.usefixtures("failing_loads")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("has_manifest", [True, False])
def test_fingerprints_alone_let_no_wrong_array_pass(folder, watcher, has_manifest):
    """Without digests a flipped bit is noticed, or it is in a file that changes nothing."""
    drawn = random.Random(1)
    if not has_manifest:
        (folder / "30" / verify.MANIFEST).unlink()
    files = [path for path in files_of(folder) if path.stat().st_size]
    largest = max(files, key=lambda path: path.stat().st_size)
    reasons = []
    for path in [*files, *[largest] * 6]:
        good = path.read_bytes()
        content = bytearray(good)
        content[drawn.randrange(len(content))] ^= 1 << drawn.randrange(8)
        path.write_bytes(content)
        watcher.notices.clear()
        store = CheckpointStore(folder, verify="off", **watcher.options())
        restored = store.restore(LIKE)
        sample.assert_exact(restored, restored.step)
        if restored.step == 20:
            reasons.append(watcher.notices[-1].reason)
            watcher.notices[-1].path.rename(folder / "30")
        path.write_bytes(good)
        if not has_manifest:
            (folder / "30" / verify.MANIFEST).unlink(missing_ok=True)
    assert reasons.count("fingerprint") >= 4 and "load" in reasons


@pytest.mark.parametrize("damage", ["truncated", "empty", "deleted"])
def test_a_file_of_any_kind_that_is_damaged_leads_to_the_step_before(folder, watcher, damage):
    files = [path for path in files_of(folder) if path.name != verify.MANIFEST]
    for path in files:
        good = path.read_bytes()
        if damage == "deleted":
            path.unlink()
        elif not good:
            continue
        else:
            path.write_bytes(good[: len(good) // 2] if damage == "truncated" else b"")
        store = CheckpointStore(folder, verify="size", **watcher.options())
        sample.assert_exact(store.restore(LIKE), 20)
        notice = watcher.notices[-1]
        assert notice.reason == ("missing" if damage == "deleted" else "size")
        assert str(path.relative_to(folder / "30")) in notice.detail
        notice.path.rename(folder / "30")
        path.write_bytes(good)
    assert len(watcher.notices) >= len(files) - 1


@pytest.mark.parametrize("content", [b"", b'{"format": 1'])
def test_a_damaged_manifest_leads_to_the_step_before(folder, watcher, content):
    (folder / "30" / verify.MANIFEST).write_bytes(content)
    sample.assert_exact(CheckpointStore(folder, **watcher.options()).restore(LIKE), 20)
    assert watcher.reasons == [("quarantined", 30, "manifest")]
    assert names(folder) == ["10", "20", "30.quarantined-manifest"]


def test_a_committed_step_without_a_manifest_is_checked_used_and_given_one(folder, watcher):
    (folder / "30" / verify.MANIFEST).unlink()
    before = {path: path.read_bytes() for path in files_of(folder)}
    sample.assert_exact(CheckpointStore(folder, **watcher.options()).restore(LIKE), 30)
    assert watcher.reasons == [("repaired", 30, None)]
    manifest = verify.read_manifest(folder / "30")
    assert manifest is not None and manifest.extra == sample.extra(30)
    verify.verify_files(folder / "30", manifest, "full")
    assert {path: path.read_bytes() for path in before} == before


def test_what_orbax_did_not_commit_and_what_is_not_ours_is_set_aside(folder, watcher):
    (folder / "40").mkdir()
    (folder / "50").write_text("a file")
    shutil.copytree(folder / "30", folder / "60")
    (folder / "60" / verify.MANIFEST).unlink()
    store = CheckpointStore(folder, **watcher.options())
    sample.assert_exact(store.restore(LIKE), 30)
    assert watcher.reasons == [
        ("quarantined", 60, "record"),
        ("quarantined", 50, "absent"),
        ("quarantined", 40, "record"),
    ]
    assert store.steps() == [10, 20, 30]


def test_links_are_refused_wherever_they_are(folder, watcher, tmp_path):
    (folder / "20").rename(tmp_path / "elsewhere")
    (folder / "20").symlink_to(tmp_path / "elsewhere")
    data = next(path for path in files_of(folder) if path.parent.name == "d")
    data.rename(tmp_path / "data")
    data.symlink_to(tmp_path / "data")
    store = CheckpointStore(folder, verify="off", **watcher.options())
    assert store.steps() == [10, 30]
    sample.assert_exact(store.restore(LIKE), 10)
    assert watcher.reasons == [
        ("quarantined", 30, "symlink"),
        ("quarantined", 20, "symlink"),
    ]
    assert (folder / "20.quarantined-symlink").is_symlink() and (tmp_path / "elsewhere").is_dir()


def test_if_all_are_bad_the_error_says_what_was_tried_and_nothing_is_deleted(folder, watcher):
    everything = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for step in (10, 20, 30):
        metadata_of(folder, step).write_bytes(b"broken")
    store = CheckpointStore(folder, **watcher.options())
    with pytest.raises(CheckpointError) as raised:
        store.restore(LIKE)
    assert raised.value.code == "XSK-601"
    for words in ("30: ", "20: ", "10: ", "_CHECKPOINT_METADATA", "nothing was deleted"):
        assert words in str(raised.value)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == everything.keys()
    # The next start must not take this for a fresh folder.
    assert store.steps() == [] and len(verify.list_quarantined_steps(folder)) == 3
    with pytest.raises(CheckpointError, match="quarantined: 10.quarantined-"):
        store.restore(LIKE)


def test_a_named_step_is_that_step_or_an_error(folder, watcher):
    metadata_of(folder, 20).write_bytes(b"broken")
    store = CheckpointStore(folder, **watcher.options())
    with pytest.raises(CheckpointError, match="step 20 cannot be restored"):
        store.restore(LIKE, 20)
    with pytest.raises(CheckpointError, match="step 25 cannot be restored"):
        store.restore(LIKE, 25)
    assert watcher.reasons[0] == ("quarantined", 20, "size")
    assert watcher.reasons[1][0] == "skipped"
    assert store.steps() == [10, 30]
    empty = CheckpointStore(folder / "none")
    assert empty.steps() == [] and verify.list_quarantined_steps(folder / "none") == []
    with pytest.raises(CheckpointError, match="no steps"):
        empty.restore(LIKE)
    assert not (folder / "none").exists()


def test_another_tree_is_an_error_and_no_reason_to_set_anything_aside(folder, watcher):
    store = CheckpointStore(folder, **watcher.options())
    renamed = {("count" if name == "step" else name): leaf for name, leaf in LIKE.items()}
    with pytest.raises(CheckpointError, match="not saved: count; saved but not requested: step"):
        store.restore(renamed)
    wider = LIKE | {"step": jax.ShapeDtypeStruct((), jnp.int16)}
    with pytest.raises(CheckpointError, match=r"step int32\[\], requested as int16\[\]"):
        store.restore(wider)
    with pytest.raises(ArgumentError, match="has no shape and dtype"):
        store.restore(LIKE | {"step": 3})
    assert not watcher.notices and store.steps() == [10, 20, 30]


def test_a_reader_changes_nothing(folder, watcher):
    metadata_of(folder, 30).write_bytes(b"broken")
    (folder / "20" / verify.MANIFEST).unlink()
    before = sorted(folder.rglob("*"))
    store = CheckpointStore(folder, is_read_only=True, **watcher.options())
    sample.assert_exact(store.restore(LIKE), 20)
    assert watcher.reasons == [("skipped", 30, "size")]
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(ArgumentError, match="XSK-102.store-closed"):
        store.save(40, sample.tree(40), {})


def test_the_newest_good_steps_are_kept_and_only_good_ones_count(folder):
    store = CheckpointStore(folder, max_to_keep=2)
    (folder / "30" / verify.MANIFEST).unlink()
    assert verify.delete_old_steps(folder, 3) == []
    metadata_of(folder, 20).write_bytes(b"broken")
    store.save(40, sample.tree(40), sample.extra(40))
    store.wait()
    # Two good ones: 40 and 10. Neither 30, without a manifest, nor 20, damaged, replaces one.
    assert store.steps() == [10, 20, 30, 40]
    store.save(50, sample.tree(50), sample.extra(50))
    store.wait()
    assert store.steps() == [40, 50] and names(folder) == ["40", "50"]
    store.close()


def test_saving_an_earlier_step_sets_the_later_ones_aside(folder, watcher):
    store = CheckpointStore(folder, **watcher.options())
    before = (folder / "30" / verify.MANIFEST).stat().st_mtime_ns
    store.save(30, sample.tree(30), sample.extra(30))  # the same bits are not written again
    store.wait()
    assert (folder / "30" / verify.MANIFEST).stat().st_mtime_ns == before and not watcher.notices
    sample.assert_exact(store.restore(LIKE, 10), 10)
    store.save(20, sample.tree(20), {"another": "past"})
    store.wait()
    assert watcher.reasons == [
        ("quarantined", 20, "superseded"),
        ("quarantined", 30, "superseded"),
    ]
    assert store.steps() == [10, 20] and store.restore(LIKE).extra == {"another": "past"}
    store.close()


def test_a_quarantined_name_that_is_taken_gets_a_number(folder):
    for expected in ("30.quarantined-size", "30.quarantined-size-2", "30.quarantined-size-3"):
        assert verify.quarantine(folder, 30, "size").name == expected
        shutil.copytree(folder / "20", folder / "30")


def test_what_a_killed_run_left_unfinished_is_cleared_by_the_next_save(folder):
    (folder / "40.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (folder / ".30.manifest").write_text("half")
    (folder / ".10.deleted").mkdir()
    (folder / "notes.txt").write_text("someone's")
    store = CheckpointStore(folder)
    sample.assert_exact(store.restore(LIKE), 30)
    store.save(40, sample.tree(40), sample.extra(40))
    store.close()
    assert names(folder) == ["20", "30", "40", "notes.txt"]


def test_calls_that_could_not_be_undone_are_refused_at_once(tmp_path):
    store = CheckpointStore(tmp_path)
    deep = json.loads("[" * 20 + "]" * 20)
    for step, extra, words in (
        (-1, {}, "number of a step is out of range"),
        (2**31, {}, "number of a step is out of range"),
        (1, {"a": (1,)}, "`extra` is not plain JSON"),
        (1, {str(i): i for i in range(100)}, "exceeds the limits of a manifest"),
        (1, {"a": deep}, "exceeds the limits of a manifest"),
    ):
        with pytest.raises(ArgumentError, match=words):
            store.save(step, sample.tree(1), extra)
    assert store.steps() == []
    store.close()
    store.close()
    with pytest.raises(ArgumentError, match="a closed store"):
        store.save(40, sample.tree(40), {})
    for options in ({"max_to_keep": 0}, {"max_to_keep": -1}):
        with pytest.raises(ArgumentError, match="XSK-102.store-settings"):
            CheckpointStore(tmp_path, **options)


# ---------- saves that fail ----------


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
@pytest.mark.parametrize("is_begun", [False, True])
def test_a_save_that_fails_is_reported_and_does_not_raise(
    store, watcher, fail, is_begun, monkeypatch
):
    monkeypatch.setattr(checkpointing, "start_save", (lambda *_: fail) if is_begun else fail)
    store.save(20, sample.tree(20), sample.extra(20))
    store.save(30, sample.tree(30), sample.extra(30))
    with pytest.raises(CheckpointError, match="20 was not saved.*checkpoint 30 was") as raised:
        store.wait()
    assert raised.value.code == "XSK-601" and isinstance(raised.value.__cause__, OSError)
    assert [failure.step for failure in watcher.failures] == [20, 30]
    assert "OSError" in watcher.failures[0].what
    store.wait()  # reported once
    sample.assert_exact(store.restore(LIKE), 10)
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
        sample.assert_exact(store.restore(LIKE), 20)  # although its manifest cannot be written yet
        assert [(f.step, f.is_committed) for f in watcher.failures] == [(20, True)] * 2
    sample.assert_exact(store.restore(LIKE), 20)
    assert watcher.reasons == [("repaired", 20, None)]
    with pytest.raises(CheckpointError, match="20 was committed but not finalized"):
        store.close()  # the second attempt, reported once


def test_a_step_that_cannot_be_renamed_is_passed_over(
    tmp_path, store, watcher, monkeypatch, caplog
):
    sample.fill(tmp_path, (10, 20))
    next((tmp_path / "20" / "state" / "d").iterdir()).write_bytes(b"")
    with monkeypatch.context() as patched:
        patched.setattr(verify, "quarantine", broken)
        sample.assert_exact(store.restore(LIKE), 10)
    assert watcher.reasons == [("skipped", 20, "size")]
    assert "could not be renamed" in watcher.notices[0].detail
    # Without callbacks, events and failures are logged.
    plain = CheckpointStore(tmp_path)
    plain.restore(LIKE)
    monkeypatch.setattr(checkpointing, "start_save", full)
    plain.save(30, sample.tree(30), {})
    assert "checkpoint 20 was quarantined (size, state/d/" in caplog.text
    assert "checkpoint 30 was not saved: OSError" in caplog.text


def test_a_machine_without_memory_is_no_reason_to_set_steps_aside(store, watcher, monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(checkpointing, "load_arrays", exhausted)
    with pytest.raises(MemoryError):
        store.restore(LIKE)
    assert store.steps() == [10] and not watcher.notices


def _after(calls: int, first, then):
    """`first` for so many calls, `then` from there on."""
    made = []

    def call(*arguments):
        made.append(arguments)
        return (first if len(made) <= calls else then)(*arguments)

    return call


def test_failed_saves_are_counted_until_a_later_step_is_saved(tmp_path):
    store, counter = CheckpointStore(tmp_path), SaveFailureCounter()
    (tmp_path / "10").mkdir()
    assert counter.count(store) == 0
    for step in (20, 30):
        counter.record_failure(SaveFailure(step, "no room", OSError("no room"), is_committed=False))
    assert counter.count(store) == 2
    (tmp_path / "40").mkdir()
    assert counter.count(store) == 0
    store.close()
