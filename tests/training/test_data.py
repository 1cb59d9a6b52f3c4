"""Reading of data folders: exact windows, a fixed order, exact resume, and damage that is named."""

import itertools
import json
import subprocess
import sys
import threading
import time
from concurrent import futures
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from tests.training import data_sample
from xsake.errors import ArgumentError, MissingExtraError
from xsake.training import data
from xsake.training.data import Batch, TokenLoader, Verifier, Windows, permute, read_index

CONTEXT, NUM_WINDOWS = 8, 13
TOKENS = CONTEXT * NUM_WINDOWS + 5  # the rest fills no window
V0_1_0 = Path(__file__).with_name("data_0_1_0")


@pytest.fixture
def folder(tmp_path):
    return data_sample.save_data(tmp_path / "data", 230, 120)  # 5 and 3 shards of at most 50


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return data_sample.save_data(tmp_path_factory.mktemp("data") / "d", TOKENS, validation=40)


def windows(folder, **changes):
    return Windows(folder, **{"context": CONTEXT} | changes)


def open_loader(folder, **changes):
    defaults = {"context": CONTEXT, "batch": 4, "seed": 5, "prefetch": 0}
    return TokenLoader(folder, **defaults | changes)


def read(loader, count):
    return list(itertools.islice(loader, count))


def assert_equal(one, other):
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.tokens, theirs.tokens)
        np.testing.assert_array_equal(mine.windows, theirs.windows)


# Windows


@pytest.mark.parametrize("context", [1, 7, 49, 50, 51, 113, 229])
def test_windows_cover_the_stream_across_files(folder, context):
    found = windows(folder, context=context)
    assert len(found) == 229 // context
    rows = found.read(np.arange(len(found)))
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(len(found) * context))
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "(?s)a shard is missing.*train-00003.bin"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "(?s)truncated.*199 bytes"),
        (lambda path: path.write_bytes(b""), "(?s)truncated.*0 bytes"),
        (lambda path: path.write_bytes(path.read_bytes() + b"0"), "(?s)too large.*201 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
        (lambda path: path.symlink_to(path.rename(path.with_suffix(".old"))), "not a regular file"),
    ],
)
def test_incomplete_files_are_errors_on_opening(folder, damage, words):
    damage(folder / "train-00003.bin")
    with pytest.raises(ArgumentError, match=words) as raised:
        windows(folder)
    assert "50 tokens of 4 bytes" in str(raised.value) and "--no-resume" in str(raised.value)
    windows(folder, split="validation")


def test_a_flipped_bit_is_detected_on_first_use_of_its_file(folder):
    path = folder / "train-00002.bin"
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)
    everything = np.arange(len(windows(folder)))
    windows(folder).read(everything)
    found = windows(folder, verify="full")
    found.read(everything[:2])  # of other files
    for numbers in (everything, everything[:2]):  # an error is permanent
        with pytest.raises(ArgumentError, match="(?s)a shard is damaged.*train-00002.bin"):
            found.read(numbers)
    found.close()
    long = windows(folder, context=100, verify="full")  # a window of three files
    with pytest.raises(ArgumentError, match="a shard is damaged"):
        long.read(np.array([0]))
    long.close()


@pytest.mark.parametrize("token", [2**17, 2**32 - 1])
def test_tokens_outside_the_vocabulary_are_errors_by_window(folder, token):
    path = folder / "train-00000.bin"
    tokens = np.fromfile(path, "<u4")
    tokens[20] = token
    tokens.tofile(path)
    found = windows(folder)
    assert found.read(np.array([0, 3])).shape == (2, 9)
    with pytest.raises(ArgumentError, match="(?s)outside the vocabulary.*window 2 of train"):
        found.read(np.array([0, 2]))


def test_a_folder_of_an_incomplete_build_is_an_error(folder, tmp_path):
    (folder / data.INDEX).unlink()
    with pytest.raises(ArgumentError, match="(?s)no data.*xsake data build"):
        read_index(folder)
    (folder / data.BUILD_LOG).write_text("")
    with pytest.raises(ArgumentError, match="(?s)interrupted.*resumes the build"):
        read_index(folder)
    with pytest.raises(ArgumentError, match="not a folder"):
        read_index(tmp_path / "none")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("schema_version", 2, "schema_version"),
        ("splits.train.tokens", 229, "train: the shards do not add up to 229"),
        ("splits.train.shards.0.tokens", 0, "splits.train.shards.0.tokens"),
        ("splits.train.shards.0.tokens", "50", "shards.0.tokens"),
        ("splits.train.shards.0.blake2b", "../x", "shards.0.blake2b"),
        ("splits.train.shards.0.path", "/etc/passwd", "shards.0.path"),
        ("shard_tokens", 49, "not full"),
        ("dtype", "uint16", "uint16 does not hold 131072"),
        ("dtype", "object", "dtype"),
        ("tokenizer.end_id", 2**17, "not in the vocabulary"),
        ("tokenizer.end_token", "\x1b[2J", "end_token"),
        ("more", 1, "more"),
    ],
)
def test_an_inconsistent_index_is_an_error(folder, path, value, words):
    index = json.loads((folder / data.INDEX).read_text())
    *before, last = path.split(".")
    part = index
    for step in before:
        part = part[int(step) if step.isdigit() else step]
    part[last] = value
    (folder / data.INDEX).write_text(json.dumps(index))
    with pytest.raises(ArgumentError, match="not an index of tokens") as raised:
        windows(folder)
    assert words in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10**5])
def test_a_file_that_is_not_an_index_is_an_error(folder, content):
    (folder / data.INDEX).write_bytes(content)
    with pytest.raises(ArgumentError, match="not an index of tokens"):
        read_index(folder)


def test_an_index_with_too_many_values_is_rejected_before_parsing(tmp_path):
    (tmp_path / "index.json").write_bytes(b'{"a":[' + b"1," * 33_000_000 + b"1]}")
    start = time.process_time()
    with pytest.raises(ArgumentError, match="values"):
        read_index(tmp_path)
    assert time.process_time() - start < 5


@pytest.mark.slow  # reads 25 MB of JSON
def test_the_largest_index_that_a_build_may_write_is_read(tmp_path):
    """Shards of 2**26 tokens: 15 trillion tokens are 223,518 of them."""
    data_sample.save_data(tmp_path, 10)
    index = json.loads((tmp_path / "index.json").read_text())
    count = 223_518
    index["splits"]["train"]["shards"] = [{"tokens": 2**26, "blake2b": "0" * 64}] * count
    index["splits"]["train"]["tokens"] = count * 2**26
    index["shard_tokens"] = 2**26
    (tmp_path / "index.json").write_text(json.dumps(index, indent=1))
    assert read_index(tmp_path).split("train").tokens == count * 2**26


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from xsake.training.data import Windows

resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
windows = Windows(Path(sys.argv[1]), context=7)
numbers = np.random.default_rng(0).permutation(len(windows))
rows = windows.read(numbers)
assert (rows == numbers[:, None] * 7 + np.arange(8)).all()
print(len(windows))
"""


def test_more_shards_than_a_process_may_open_are_read(tmp_path):
    folder = data_sample.save_data(tmp_path / "data", 1200 * 10, shard_tokens=10)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and int(done.stdout) == (12_000 - 1) // 7, done.stderr


def test_mapped_files_stay_readable_and_replaced_ones_are_errors(tmp_path, monkeypatch):
    folder = data_sample.save_data(tmp_path / "data", 400, shard_tokens=10)
    mapped = windows(folder, context=10)
    monkeypatch.setattr(data, "MAX_MAPS", 2)
    limited = windows(folder, context=10)
    for path in sorted(folder.glob("*.bin")):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    np.testing.assert_array_equal(mapped.read(np.array([9]))[0], np.arange(90, 101))
    with pytest.raises(ArgumentError, match=r"(?s)replaced while.*train-00009\.bin"):
        limited.read(np.array([9]))


def test_a_closed_loader_keeps_no_file_mapped(folder):
    num_mapped = lambda: Path("/proc/self/maps").read_text().count(f"{folder}/train-")
    loader = open_loader(folder)
    next(loader)
    assert num_mapped() == 5
    loader.close()
    assert num_mapped() == 0


def test_threads_read_the_same_windows_while_maps_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_MAPS", 2)
    found = windows(data_sample.save_data(tmp_path / "data", 400, shard_tokens=10), context=7)
    numbers = [np.random.default_rng(seed).permutation(len(found)) for seed in range(8)]
    with futures.ThreadPoolExecutor(8) as pool:
        for chosen, rows in zip(numbers, pool.map(found.read, numbers), strict=True):
            np.testing.assert_array_equal(rows, chosen[:, None] * 7 + np.arange(8))


def test_files_are_verified_once_before_use_and_late_damage_is_raised_later():
    seen, release = [], threading.Event()
    quick = Verifier(lambda number: (time.sleep(0.05), seen.append(number)))
    quick.use([0, 1])
    assert sorted(seen) == [0, 1]
    quick.use([1, 0, 2])
    assert sorted(seen) == [0, 1, 2] and quick.close() == 0

    def check(number):
        release.wait()
        raise ValueError(f"file {number}")

    slow, began = Verifier(check, wait_seconds=0.2), time.monotonic()
    for _ in range(5):
        slow.use([0])
    assert time.monotonic() - began < 5
    release.set()
    with pytest.raises(ValueError, match="file 0"):
        while time.monotonic() - began < 20:
            time.sleep(0.01)
            slow.use([])
    slow.close()

    release.clear()
    unfinished = Verifier(lambda _: release.wait(), wait_seconds=0.0)
    unfinished.use(range(100))
    num_unverified = unfinished.close()
    release.set()
    assert 90 <= num_unverified < 100


# Order

sizes = st.integers(1, 2000)
seeds = st.integers(-(2**70), 2**70)


@hypothesis.given(sizes, seeds, st.integers(0, 2**40), st.data())
def test_every_epoch_is_a_permutation_that_does_not_depend_on_the_query(size, seed, epoch, draw):
    whole = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert whole.dtype == np.int64
    np.testing.assert_array_equal(np.sort(whole), np.arange(size))
    chosen = np.array(draw.draw(st.lists(st.integers(0, size - 1), max_size=20)), np.int64)
    np.testing.assert_array_equal(permute(chosen, size=size, seed=seed, epoch=epoch), whole[chosen])


def test_the_order_is_the_one_of_existing_checkpoints():
    """If this fails, resumed runs would read other batches."""
    first = data.positions_to_windows(np.arange(24), windows=12, seed=0)
    assert first.tolist() == [
        5, 2, 7, 1, 8, 10, 11, 3, 6, 0, 9, 4,
        3, 0, 5, 4, 8, 6, 11, 7, 10, 1, 2, 9,
    ]  # fmt: skip
    large = permute(np.arange(4), size=10**12, seed=7, epoch=3)
    assert large.tolist() == [47242565694, 732575120442, 682130162110, 715430300086]
    far = data.positions_to_windows(np.array([2**61, 2**61 + 1]), windows=2**40 + 1, seed=0)
    assert (far >= 0).all() and (far <= 2**40).all() and far[0] != far[1]


def test_seeds_and_epochs_give_unrelated_orders():
    size, pairs = 1000, list(itertools.product(range(4), range(4)))
    orders = [permute(np.arange(size), size=size, seed=seed, epoch=epoch) for seed, epoch in pairs]
    for one, other in itertools.combinations(range(len(pairs)), 2):
        # Includes seed 1 in epoch 0 with seed 0 in epoch 1.
        assert (orders[one] == orders[other]).sum() < 12, (pairs[one], pairs[other])


def test_the_order_is_uniform_and_separates_neighbours():
    size, trials = 6, 600
    found = np.array([
        permute(np.arange(size), size=size, seed=seed, epoch=0) for seed in range(trials)
    ])  # fmt: skip
    for position in range(size):
        counts = np.bincount(found[:, position], minlength=size)
        expected = trials / size
        assert np.abs(counts - expected).max() < 5 * np.sqrt(expected), (position, counts)
    order = permute(np.arange(5000), size=5000, seed=0, epoch=0)
    assert (np.abs(np.diff(order)) <= 2).sum() < 15
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06


# Batches


def test_a_batch_has_the_tokens_of_its_windows(shared):
    for batch in read(open_loader(shared), 9):
        assert isinstance(batch, Batch)
        assert batch.tokens.dtype == np.int32 and batch.tokens.shape == (4, CONTEXT + 1)
        assert batch.windows.dtype == np.int64 and batch.windows.shape == (4,)
        # In this data a token is its position, and shards end inside windows.
        expected = batch.windows[:, None] * CONTEXT + np.arange(CONTEXT + 1)
        np.testing.assert_array_equal(batch.tokens, expected)
    batch = next(open_loader(shared, split="validation"))
    assert batch.tokens.max() < 40 and batch.windows.max() < 4


@hypothesis.given(batch=st.integers(1, 30), seed=st.integers(0, 100), epochs=st.integers(1, 3))
def test_every_window_is_read_once_in_every_epoch(shared, batch, seed, epochs):
    steps = -(-epochs * NUM_WINDOWS // batch)
    run = read(open_loader(shared, batch=batch, seed=seed), steps)
    numbers = np.concatenate([one.windows for one in run])[: epochs * NUM_WINDOWS]
    for epoch in numbers.reshape(epochs, NUM_WINDOWS):
        assert sorted(epoch) == list(range(NUM_WINDOWS))


@hypothesis.given(
    stop=st.integers(0, 12),
    batch=st.sampled_from([1, 4, 13, 20]),
    ahead=st.sampled_from([0, 1, 3]),
    processes=st.sampled_from([1, 2, 4]),
)
def test_a_resumed_run_reads_the_batches_of_a_straight_run(shared, stop, batch, ahead, processes):
    """At every step, edges of epochs included, also if other processes continue."""
    hypothesis.assume(batch % processes == 0)
    straight = read(open_loader(shared, batch=batch), stop + 5)
    stopped = open_loader(shared, batch=batch, prefetch=ahead)
    before = read(stopped, stop)
    state = json.loads(json.dumps(stopped.state()))
    stopped.close()
    assert_equal(before, straight[:stop])
    rows = batch // processes
    for process in range(processes):
        again = open_loader(
            shared, batch=batch, prefetch=ahead, process=process, processes=processes
        )
        again.restore(state)
        assert again.state() == state
        mine = slice(process * rows, (process + 1) * rows)
        expected = [Batch(one.tokens[mine], one.windows[mine]) for one in straight[stop:]]
        assert_equal(read(again, 5), expected)
        again.close()


def test_data_and_loader_states_of_0_1_0_continue():
    """Folder, state and batches were written by version 0.1.0."""
    state = {
        "version": 1, "step": 11, "seed": 3, "batch": 4, "context": 16, "split": "train",
        "data": "1c5570530fa608b450366b31c8b8a4a2",
    }  # fmt: skip
    loader = TokenLoader(V0_1_0, context=16, batch=4, seed=3, verify="full", vocabulary=257)
    data.require_tokenizer(V0_1_0, loader.windows.index)
    loader.restore(state)
    assert loader.state() == state
    batches = read(loader, 6)
    loader.close()
    assert [batch.windows.tolist() for batch in batches] == [
        [24, 25, 18, 6], [7, 17, 9, 12], [5, 8, 22, 14],
        [15, 29, 23, 27], [30, 13, 1, 11], [29, 8, 30, 5],
    ]  # fmt: skip
    tokens = [71, 64, 67, 68, 66, 256, 16, 22, 220, 66, 71, 65, 65, 67, 70, 66, 71]
    assert batches[0].tokens[0].tolist() == tokens


def test_a_loader_can_go_back(shared):
    loader, plain = open_loader(shared, prefetch=3), open_loader(shared)
    start, first = loader.state(), []
    for step in range(8):
        assert plain.state() == loader.state() and loader.state()["step"] == step
        first.append(next(loader))
        np.testing.assert_array_equal(loader.window_ids(step), first[-1].windows)
        assert_equal(first[-1:], [next(plain)])
    loader.restore(start)
    assert_equal(read(loader, 8), first)
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        next(loader)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_batch_that_fails_is_still_the_next_one(shared, ahead, error, monkeypatch):
    straight = read(open_loader(shared), 6)
    loader = open_loader(shared, prefetch=ahead)
    intact, failing = loader.windows.read, set(straight[2].windows.tolist())

    def read_once(numbers):
        if set(numbers.tolist()) == failing:
            failing.clear()
            raise error
        return intact(numbers)

    monkeypatch.setattr(loader.windows, "read", read_once)
    assert_equal(read(loader, 2), straight[:2])
    with pytest.raises(type(error)):
        next(loader)
    assert loader.state()["step"] == 2
    assert_equal(read(loader, 4), straight[2:])
    loader.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 5, "processes": 2}, "(?s)not divisible by.*5 windows for 2 processes"),
        ({"batch": 0}, "not divisible by the number of processes"),
        ({"processes": 0}, "not divisible by the number of processes"),
        ({"process": 2, "processes": 2}, "(?s)process index is out of range.*0 to 1"),
        ({"process": -1}, "process index is out of range"),
        ({"context": 0}, "context is not positive"),
        ({"context": TOKENS}, f"(?s)less than one window.*{TOKENS} tokens in train.*{TOKENS}"),
        ({"context": 40, "split": "validation"}, "(?s)less than one window.*40 tokens in valid"),
        ({"vocabulary": 1000}, "(?s)larger than that of the model.*131,072.*of 1,000"),
        ({"prefetch": -1}, "prefetch is negative"),
    ],
)
def test_invalid_arguments_are_errors(shared, changes, words):
    with pytest.raises(ArgumentError, match=words):
        open_loader(shared, **changes)
    fitting = open_loader(shared, context=TOKENS - 1, vocabulary=2**17)
    np.testing.assert_array_equal(next(fitting).tokens[0], np.arange(TOKENS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 6}, "(?s)the seed differs.*seed 6.*seed 5"),
        ({"batch": 8}, "batch differs"),
        ({"context": 9}, "the context differs"),
        ({"split": "validation"}, "split differs"),
        ({"data": "other"}, "the data differs"),
        ({"step": -1}, "invalid state"),
        ({"step": "3"}, "invalid state"),
        ({"step": 2**61}, "invalid state"),
        ({"version": 2}, "invalid state"),
        ({"more": 1}, "invalid state"),
    ],
)
def test_a_state_of_other_batches_is_an_error(shared, changes, words):
    loader = open_loader(shared)
    read(loader, 2)
    with pytest.raises(ArgumentError, match=words):
        loader.restore(loader.state() | changes)
    assert loader.state()["step"] == 2


def test_a_state_fits_copies_of_its_data_and_steps_of_a_run(shared, tmp_path):
    loader = open_loader(shared, batch=2**10)
    with pytest.raises(ArgumentError, match="XSK-102.loader-step"):
        loader.restore(loader.state() | {"step": 2**53})
    far = loader.state() | {"step": 2**40}
    other = open_loader(data_sample.save_data(tmp_path / "other", TOKENS + 1), batch=2**10)
    with pytest.raises(ArgumentError, match="the data differs"):
        other.restore(far)
    copy = open_loader(data_sample.save_data(tmp_path / "copy", TOKENS), batch=2**10)
    copy.restore(far)
    assert next(copy).windows.shape == (2**10,)


def test_a_missing_grain_names_the_install_command(shared, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(MissingExtraError, match=r"xsake\[train\]"):
        open_loader(shared)
