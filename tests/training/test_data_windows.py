"""Windows and the files below them: read exactly, and refused with a reason if damaged."""

import concurrent.futures
import json
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.training import data_sample
from xsake.errors import ArgumentError
from xsake.training.data import Windows, read_index, shards
from xsake.training.data.index import BUILD_LOG, INDEX


@pytest.fixture
def folder(tmp_path):
    return data_sample.save_data(tmp_path / "data", 230, 120)  # 5 and 3 shards of at most 50


def windows(folder, **changes):
    return Windows(folder, **{"context": 8} | changes)


@pytest.mark.parametrize("context", [1, 7, 49, 50, 51, 113, 229])
def test_windows_cover_the_stream_across_files(folder, context):
    found = windows(folder, context=context)
    assert len(found) == 229 // context
    rows = found.read(np.arange(len(found)))
    np.testing.assert_array_equal(rows[:, :-1].ravel(), np.arange(len(found) * context))
    np.testing.assert_array_equal(rows[1:, 0], rows[:-1, -1])


def test_a_full_last_shard_is_read_to_its_end(tmp_path):
    folder = data_sample.save_data(tmp_path / "d", 101, shard_tokens=101)
    np.testing.assert_array_equal(
        windows(folder, context=100).read(np.array([0]))[0], np.arange(101)
    )


def test_an_empty_split_has_no_window(tmp_path):
    folder = data_sample.save_data(tmp_path / "d", 101)
    with pytest.raises(ArgumentError, match="(?s)less than one window.*0 tokens in validation"):
        windows(folder, split="validation")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "(?s)a shard is missing.*train-00003.bin"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            "(?s)truncated.*199 bytes, expected 200",
        ),
        (lambda path: path.write_bytes(b""), "(?s)truncated.*0 bytes, expected 200"),
        (lambda path: path.write_bytes(path.read_bytes() + b"0"), "(?s)too large.*201 bytes"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    ],
)
def test_files_that_are_not_whole_are_refused_on_opening(folder, damage, words):
    damage(folder / "train-00003.bin")
    with pytest.raises(ArgumentError, match=words) as raised:
        windows(folder)
    assert "50 tokens of 4 bytes" in str(raised.value) and "--no-resume" in str(raised.value)
    windows(folder, split="validation")


def test_links_are_refused(folder, tmp_path):
    elsewhere = (folder / "train-00000.bin").rename(tmp_path / "elsewhere.bin")
    (folder / "train-00000.bin").symlink_to(elsewhere)
    with pytest.raises(ArgumentError, match="not a regular file"):
        windows(folder)


def test_a_flipped_bit_is_found_when_its_file_is_first_used(folder):
    path = folder / "train-00002.bin"
    content = bytearray(path.read_bytes())
    content[17] ^= 1
    path.write_bytes(content)
    everything = np.arange(len(windows(folder)))
    windows(folder).read(everything)
    found = windows(folder, verify="full")
    found.read(everything[:2])  # of other files
    for numbers in (everything, everything[:2]):  # what was found once stays found
        with pytest.raises(ArgumentError, match="(?s)a shard is damaged.*train-00002.bin"):
            found.read(numbers)
    found.close()


def test_every_file_of_a_window_is_used(folder):
    found = windows(folder, context=100)  # longer than a file
    size, tokens = found.index.shard_tokens, 101
    assert found._find_shards(np.array([0])) == list(range((tokens - 1) // size + 1))


def test_tokens_that_nobody_knows_are_refused_by_window(folder):
    path = folder / "train-00000.bin"
    for token in (2**17, 2**32 - 1):
        tokens = np.fromfile(path, "<u4")
        tokens[20] = token
        tokens.tofile(path)
        found = windows(folder)
        assert found.read(np.array([0, 3])).shape == (2, 9)
        with pytest.raises(ArgumentError, match="(?s)outside the vocabulary.*window 2 of train"):
            found.read(np.array([0, 2]))


def test_a_folder_that_was_never_finished_is_refused(folder, tmp_path):
    (folder / INDEX).unlink()
    with pytest.raises(ArgumentError, match="(?s)no data.*xsake data build"):
        read_index(folder)
    (folder / BUILD_LOG).write_text("")
    with pytest.raises(ArgumentError, match="(?s)interrupted.*resumes the build"):
        read_index(folder)
    with pytest.raises(ArgumentError, match="not a folder"):
        read_index(tmp_path / "none")


def change(*steps, to):
    def changed(index):
        *before, last = steps
        for step in before:
            index = index[step]
        index[last] = to

    return changed


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change("schema_version", to=2), "schema_version"),
        (change("splits", "train", "tokens", to=229), "train: the shards do not add up to 229"),
        (change("splits", "train", "shards", 0, "tokens", to=0), "splits.train.shards.0.tokens"),
        (change("splits", "train", "shards", 0, "tokens", to="50"), "shards.0.tokens"),
        (change("splits", "train", "shards", 0, "blake2b", to="../x"), "shards.0.blake2b"),
        (change("splits", "train", "shards", 0, "path", to="/etc/passwd"), "shards.0.path"),
        (change("shard_tokens", to=49), "not full"),
        (change("dtype", to="uint16"), "uint16 does not hold 131072"),
        (change("dtype", to="object"), "dtype"),
        (change("tokenizer", "end_id", to=2**17), "not in the vocabulary"),
        (change("tokenizer", "end_token", to="\x1b[2J"), "end_token"),
        (change("more", to=1), "more"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(folder, damage, words):
    index = json.loads((folder / INDEX).read_text())
    damage(index)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ArgumentError, match="not an index of tokens") as raised:
        windows(folder)
    assert words in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10**5])
def test_what_is_no_index_is_refused(folder, content):
    (folder / INDEX).write_bytes(content)
    with pytest.raises(ArgumentError, match="not an index of tokens"):
        read_index(folder)


def test_data_that_is_replaced_stays_readable_for_who_has_it_open(folder):
    found = windows(folder)
    for path in folder.glob("*.bin"):
        path.unlink()
    np.testing.assert_array_equal(found.read(np.array([5]))[0], np.arange(40, 49))


def test_an_index_of_numbers_is_refused_at_once(tmp_path):
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


def test_threads_read_the_same_windows_while_files_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_MAPS", 2)
    found = windows(data_sample.save_data(tmp_path / "data", 400, shard_tokens=10), context=7)
    numbers = [np.random.default_rng(seed).permutation(len(found)) for seed in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for chosen, rows in zip(numbers, pool.map(found.read, numbers), strict=True):
            np.testing.assert_array_equal(rows, chosen[:, None] * 7 + np.arange(8))


def test_a_file_that_is_replaced_before_it_is_mapped_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_MAPS", 2)
    folder = data_sample.save_data(tmp_path / "data", 400, shard_tokens=10)
    found = windows(folder, context=10)
    path = folder / "train-00009.bin"
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"(?s)replaced while.*train-00009\.bin"):
        found.read(np.array([9]))
