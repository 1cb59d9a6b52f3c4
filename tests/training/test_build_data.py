"""A build: exact tokens, the same bytes every time, resumable at any point, never half readable."""

import contextlib
import errno
import hashlib
import itertools
import json
import re
import sys
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from tests.training import data_sample
from tests.training.data_sample import END, files_of, letters, save_texts, save_tokenizer
from xsake.errors import ArgumentError, CheckpointError, MissingExtraError
from xsake.model.tokenizer import Tokenizer
from xsake.training import build_data, corpus
from xsake.training.build_data import BuildSettings, NewTokenizer, TokenizerFile, Vocabulary, build
from xsake.training.data import ITEMSIZE, Windows, read_index

SMALL = BuildSettings(shard_tokens=300, validation=0.2)
TEXTS = [text * 3 for text in letters(200, seed=1)]
TRAIN = [text for text in letters(60) if data_sample.split_of(text, 0.2) == "train"]


class Stop(Exception):
    pass


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    texts = save_texts(folder / "texts.txt", letters(60))
    return save_tokenizer(folder / "tokenizer"), [texts]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Documents have several pieces, and pieces come in several batches."""
    monkeypatch.setattr(corpus, "MAX_PIECE_CHARS", 40)
    monkeypatch.setattr(build_data, "MAX_PIECE_CHARS", 250)


@pytest.fixture
def straight(inputs, tmp_path):
    """An uninterrupted build: its files, and its progress."""
    seen = []
    build(*inputs, tmp_path / "straight", SMALL, on_progress=seen.append)
    return files_of(tmp_path / "straight"), seen


def stop_at(call):
    """A callback that stops the build at its n-th call."""
    calls = iter(range(call + 1))

    def on_progress(progress):
        if next(calls) == call:
            raise Stop

    return on_progress


def interrupt(source, texts, folder, call):
    with pytest.raises(Stop):
        build(source, texts, folder, SMALL, on_progress=stop_at(call))
    with pytest.raises(ArgumentError, match=r"has no data|was interrupted"):
        read_index(folder)


def stream(folder, split):
    index = read_index(folder)
    files = sorted(folder.glob(f"{split}-*.bin"))
    parts = [np.fromfile(file, f"<u{ITEMSIZE[index.dtype]}") for file in files]
    assert [shard.tokens for shard in index.split(split).shards] == [len(part) for part in parts]
    return np.concatenate(parts)


def documents_of(folder, split):
    tokenizer, end = Tokenizer.load(folder), read_index(folder).tokenizer.end_id
    tokens = stream(folder, split)
    ends = np.flatnonzero(tokens == end)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]


def test_the_files_hold_every_document_with_an_end_and_the_index_describes_them(inputs, tmp_path):
    (tokenizer, (text,)), folder = inputs, tmp_path / "data"
    built = build(tokenizer, [text], folder, SMALL)
    index = built.index
    assert built.is_new and index == read_index(folder)
    # Version 0.1.0 reads an index without this field.
    assert "skipped" not in json.loads((folder / "index.json").read_text())
    for split in ("train", "validation"):
        documents = [text for text in letters(60) if data_sample.split_of(text, 0.2) == split]
        assert documents_of(folder, split) == documents and len(documents) > 5
        assert index.split(split).documents == len(documents)
        assert index.split(split).tokens == sum(len(text) + 1 for text in documents)
    sizes = [shard.tokens for shard in index.splits.train.shards]
    assert len(sizes) > 3 and set(sizes[:-1]) == {300} and 0 < sizes[-1] <= 300
    for number, shard in enumerate(index.splits.train.shards):
        content = (folder / f"train-{number:05d}.bin").read_bytes()
        assert shard.blake2b == hashlib.blake2b(content, digest_size=32).hexdigest()
    content = (tokenizer / "tokenizer.json").read_bytes()
    assert index.tokenizer.sha256 == hashlib.sha256(content).hexdigest()
    assert (folder / "tokenizer.json").read_bytes() == content
    assert (index.tokenizer.vocabulary, index.tokenizer.end_id, index.dtype) == (257, 256, "uint16")
    (source,) = index.sources
    assert source.sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert (source.name, source.documents, source.bytes) == ("texts.txt", 60, text.stat().st_size)
    assert index.versions.keys() == {"tokenizers", "xsake"}


def test_large_vocabularies_take_four_bytes(inputs, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "large", more=70_000)
    index = build(tokenizer, inputs[1], tmp_path / "data", SMALL).index
    assert index.dtype == "uint32" and index.tokenizer.end_id == 70_256
    assert documents_of(tmp_path / "data", "train") == TRAIN
    assert Windows(tmp_path / "data", context=16).read(np.arange(3)).max() <= 70_256


def test_the_same_inputs_give_the_same_bytes_and_any_shard_size_the_same_tokens(
    inputs, tmp_path, straight
):
    build(*inputs, tmp_path / "again", SMALL)
    assert files_of(tmp_path / "again") == straight[0]
    for size in (29, 2**26):  # smaller than a document, and larger than all
        folder = tmp_path / f"shards of {size}"
        build(*inputs, folder, BuildSettings(shard_tokens=size, validation=0.2))
        np.testing.assert_array_equal(
            stream(folder, "train"), stream(tmp_path / "straight", "train")
        )


def test_an_end_token_in_a_document_is_text_and_validation_may_be_empty(tmp_path, inputs):
    path = save_texts(tmp_path / "a.txt", [f"before {END} after", "second"])
    index = build(inputs[0], [path], tmp_path / "data", BuildSettings(validation=0.0)).index
    assert documents_of(tmp_path / "data", "train") == [f"before {END} after", "second"]
    assert index.splits.train.documents == 2 and index.splits.validation.shards == ()


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_build_that_is_stopped_anywhere_resumes_to_the_same_bytes(inputs, tmp_path, is_trained):
    tokenizer, texts = inputs
    source, seen = NewTokenizer(270) if is_trained else tokenizer, []
    build(source, texts, tmp_path / "straight", SMALL, on_progress=seen.append)
    straight = files_of(tmp_path / "straight")
    assert len(seen) > 10
    for call in range(0, len(seen), 5 if is_trained else 1):
        folder = tmp_path / f"stopped {call}"
        interrupt(source, texts, folder, call)
        assert build(source, texts, folder, SMALL).is_new and files_of(folder) == straight


def test_a_build_that_is_stopped_after_each_shard_finishes(inputs, tmp_path, straight):
    folder, stops, built = tmp_path / "data", 0, None
    while built is None:
        written = len(list(folder.glob("*.bin")))

        def stop_after_one(progress, already=written):
            if progress.detail and len(list(folder.glob("*.bin"))) > already:
                raise Stop

        with contextlib.suppress(Stop):
            built = build(*inputs, folder, SMALL, on_progress=stop_after_one)
        stops += built is None
    assert stops > 3 and files_of(folder) == straight[0]


def test_finished_files_are_kept_and_not_tokenized_again(inputs, tmp_path, straight, monkeypatch):
    files, seen = straight
    late = max(i for i, progress in enumerate(seen) if progress.detail) - 2
    interrupt(*inputs, tmp_path / "data", late)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("train-*.bin")}
    encoded, encode = [], Vocabulary.encode
    monkeypatch.setattr(
        Vocabulary, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts)
    )
    built = build(*inputs, tmp_path / "data", SMALL)
    assert built.kept >= len(kept) > 3 and built.rewritten == 0
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    assert 0 < sum(map(len, encoded)) < 0.5 * sum(map(len, letters(60)))
    assert files_of(tmp_path / "data") == files


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_of_an_earlier_run_is_written_again(inputs, tmp_path, straight, damage):
    files, seen = straight
    folder = tmp_path / "data"
    interrupt(*inputs, folder, len(seen) - 1)
    path = folder / "train-00001.bin"
    content = path.read_bytes()
    path.unlink()
    if damage != "remove":
        path.write_bytes(bytes([content[0] ^ 4]) + content[1:] if damage == "flip" else content[2:])
    built = build(*inputs, folder, SMALL)
    assert built.rewritten > 0 and built.kept > 0
    assert files_of(folder) == files


def test_files_of_a_killed_process_are_removed(inputs, tmp_path, straight):
    """Half a line in the log, a temporary file, and a shard that is not in the log."""
    folder = tmp_path / "data"
    interrupt(*inputs, folder, 9)
    log = folder / "building.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    (folder / ".train-00004.bin.ab12_cd9").write_bytes(b"half")
    build(*inputs, folder, SMALL)
    assert files_of(folder) == straight[0]


def test_a_log_of_0_1_0_is_read(tmp_path):
    shard = {"tokens": 5, "blake2b": "1" * 64}
    shards = [
        {
            "step": "shard",
            "split": "train",
            "number": number,
            "shard": shard,
            "piece": 3,
            "offset": 2,
        }
        for number in (0, 1, 3, 1)  # a gap, and one that was written again
    ]
    start = [{"step": "start", "recipe": "a" * 64}, {"step": "tokenizer", "sha256": "b" * 64}]
    path = tmp_path / "building.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in start + shards) + '{"step"')
    log = build_data.BuildLog(tmp_path)
    assert (log.recipe, log.tokenizer) == ("a" * 64, "b" * 64)
    assert [each.number for each in log.shards["train"]] == [0, 1] and not log.shards["validation"]
    other = {"step": "tokenizer", "sha256": "c" * 64}  # shards of another tokenizer do not count
    path.write_text("".join(json.dumps(line) + "\n" for line in [*start, *shards, other]))
    assert build_data.BuildLog(tmp_path).shards == {"train": [], "validation": []}


def test_a_full_disk_costs_one_file(inputs, tmp_path, straight, monkeypatch):
    write, left = build_data.atomic_write, iter([True] * 5 + [False])  # the tokenizer has two

    def fill(path, content):
        if not next(left):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(build_data, "atomic_write", fill)
        with pytest.raises(OSError, match="No space"):
            build(*inputs, tmp_path / "data", SMALL)
    assert build(*inputs, tmp_path / "data", SMALL).kept == 3
    assert files_of(tmp_path / "data") == straight[0]


def test_a_complete_build_is_verified_and_not_repeated(inputs, tmp_path, monkeypatch):
    folder = tmp_path / "data"
    build(*inputs, folder, SMALL)
    before = files_of(folder)
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "encode", None)
        built = build(*inputs, folder, SMALL)
    assert not built.is_new and built.kept == len(list(folder.glob("*.bin")))
    (folder / "validation-00000.bin").write_bytes(b"00")
    with pytest.raises(ArgumentError, match="(?s)truncated.*validation-00000.bin.*--no-resume"):
        build(*inputs, folder, SMALL)
    assert build(*inputs, folder, SMALL, overwrite=True).is_new
    assert files_of(folder) == before
    for content in (None, "{"):  # a lost index
        (folder / "index.json").unlink()
        if content is not None:
            (folder / "index.json").write_text(content)
        with pytest.raises(ArgumentError, match="not empty|not an index"):
            build(*inputs, folder, SMALL)
        build(*inputs, folder, SMALL, overwrite=True)
        assert files_of(folder) == before


@pytest.mark.parametrize("is_complete", [False, True])
def test_other_data_is_overwritten_on_request_only(inputs, tmp_path, is_complete):
    tokenizer, texts = inputs
    folder = tmp_path / "data"
    if is_complete:
        build(*inputs, folder, SMALL)
    else:
        interrupt(*inputs, folder, 8)
    before = files_of(folder)
    more = save_texts(tmp_path / "more.txt", letters(30, seed=9))
    others = [
        (tokenizer, [more], SMALL),
        (tokenizer, texts, BuildSettings(shard_tokens=100, validation=0.2)),
        (tokenizer, texts, BuildSettings(shard_tokens=300, validation=0.1)),
        (tokenizer, texts, BuildSettings(shard_tokens=300, validation=0.2, end_token="a")),
        (NewTokenizer(300), texts, SMALL),
    ]
    for source, paths, settings in others:
        with pytest.raises(ArgumentError, match="(?s)holds another build.*--no-resume"):
            build(source, paths, folder, settings)
    assert files_of(folder) == before
    build(tokenizer, [more], folder, SMALL, overwrite=True)
    build(tokenizer, [more], tmp_path / "new", SMALL)
    assert files_of(folder) == files_of(tmp_path / "new")


@pytest.mark.parametrize("overwrite", [False, True])
def test_folders_with_other_files_are_not_touched(inputs, tmp_path, overwrite):
    folder = save_tokenizer(tmp_path / "checkpoint")
    (folder / "tokenizer_config.json").write_text("{}")
    before = files_of(folder)
    with pytest.raises(ArgumentError, match="(?s)not empty.*tokenizer.json.*another folder"):
        build(*inputs, folder, SMALL, overwrite=overwrite)
    (folder / "index.json").write_text("{}")
    with pytest.raises(ArgumentError):
        build(*inputs, folder, SMALL, overwrite=overwrite)
    assert files_of(folder) == before | {"index.json": b"{}"}


def test_files_built_from_a_text_that_changed_are_not_kept(inputs, tmp_path, monkeypatch):
    (tokenizer, (path,)), folder = inputs, tmp_path / "data"
    texts = tmp_path / "texts.txt"
    texts.write_bytes(path.read_bytes())
    read = corpus.Corpus.read

    def change_and_read(self):
        texts.write_text(texts.read_text().replace("a", "b"))
        yield from read(self)

    with monkeypatch.context() as patch:
        patch.setattr(corpus.Corpus, "read", change_and_read)
        with pytest.raises(ArgumentError, match="(?s)changed during the build.*--no-resume"):
            build(tokenizer, [texts], folder, SMALL)
    texts.write_bytes(path.read_bytes())
    with pytest.raises(ArgumentError, match="holds other files than a build"):
        build(tokenizer, [texts], folder, SMALL)
    build(tokenizer, [texts], folder, SMALL, overwrite=True)
    build(tokenizer, [path], tmp_path / "whole", SMALL)
    assert files_of(folder) == files_of(tmp_path / "whole")


def test_a_tokenizer_is_trained_once_on_the_train_split(inputs, tmp_path, monkeypatch):
    source, texts, folder = NewTokenizer(300), inputs[1], tmp_path / "data"
    interrupt(source, texts, folder, 6)
    with monkeypatch.context() as patch:
        patch.setattr(TokenizerFile, "train", None)
        index = build(source, texts, folder, SMALL).index
    assert (index.tokenizer.vocabulary, index.tokenizer.asked_vocabulary) == (300, 300)
    assert (index.tokenizer.end_token, index.tokenizer.end_id) == (END, 0)
    assert documents_of(folder, "train") == TRAIN
    assert index.tokenizer.sha256 == TokenizerFile.train(iter(TRAIN), 300).sha256


def test_shards_of_a_lost_tokenizer_do_not_count(inputs, tmp_path, monkeypatch):
    """If training gave another tokenizer, its tokens must not join the old ones."""
    source, folder = NewTokenizer(300), tmp_path / "data"
    interrupt(source, inputs[1], folder, 9)
    (folder / "tokenizer.json").write_text("{}")
    other = TokenizerFile.train(iter(["other text"] * 9), 300)
    with monkeypatch.context() as patch:
        patch.setattr(TokenizerFile, "train", lambda texts, vocabulary: other)
        built = build(source, inputs[1], folder, SMALL)
    assert built.kept == 0 and built.index.tokenizer.sha256 == other.sha256
    assert documents_of(folder, "train") == TRAIN


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BuildSettings(shard_tokens=0), "size of a shard is out of range"),
        (lambda: BuildSettings(shard_tokens=2**31), "size of a shard is out of range"),
        (lambda: BuildSettings(validation=1.0), "validation share is out of range"),
        (lambda: BuildSettings(validation=-0.1), "validation share is out of range"),
        (lambda: BuildSettings(validation=float("nan")), "validation share is out of range"),
        (lambda: BuildSettings(end_token="a"), "remove --end-token"),
        (lambda: NewTokenizer(256), "(?s)out of range.*257"),
        (lambda: NewTokenizer(2**30), "(?s)out of range.*257"),
    ],
)
def test_invalid_settings_are_errors(inputs, tmp_path, make, words):
    with pytest.raises(ArgumentError, match=words):
        build(NewTokenizer(300), inputs[1], tmp_path / "data", make())


def test_progress_is_reported(straight):
    files, seen = straight
    assert seen[0].label == "reading texts.txt"
    steps = [progress for progress in seen if progress.label.endswith("tokens, tokenizing")]
    assert all(a.done <= b.done for a, b in itertools.pairwise(steps))
    assert steps[-1].done == steps[-1].total > 60
    finished = [progress.detail for progress in steps if progress.detail]
    assert len(finished) == sum(name.endswith(".bin") for name in files)
    assert "train file 1: 300 tokens" in finished


# Tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    return save_tokenizer(tmp_path / "checkpoint")


def installed(folder, file):
    folder.mkdir(exist_ok=True)
    file.install(folder)
    return Vocabulary(folder)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_checkpoint_is_named_by_its_folder_or_its_file(checkpoint, tmp_path, name):
    file = TokenizerFile.from_checkpoint(checkpoint / name)
    assert file.content == (checkpoint / "tokenizer.json").read_bytes() and file.end_token == END
    found = installed(tmp_path / "data", file)
    assert (found.size, found.end_id, found.dtype) == (257, 256, np.dtype("<u2"))
    assert Tokenizer.load(tmp_path / "data").end_ids == (256,)
    theirs = Tokenizer.load(checkpoint)
    for text, tokens in zip(TEXTS[:20], found.encode(TEXTS[:20]), strict=True):
        np.testing.assert_array_equal(tokens, theirs.encode(text))


def test_the_end_token_is_that_of_the_checkpoint(checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"eos_token_id": 65}))
    word = TokenizerFile.from_checkpoint(checkpoint).end_token
    assert Tokenizer.load(checkpoint).inner.token_to_id(word) == 65
    # Several end tokens, as chat models have them: the usual name decides.
    (checkpoint / "config.json").write_text(json.dumps({"eos_token_id": [65, 66]}))
    assert TokenizerFile.from_checkpoint(checkpoint).end_token == END
    assert TokenizerFile.from_checkpoint(checkpoint, "a").end_token == "a"


def test_a_checkpoint_without_an_end_token_needs_one(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 70_000}, []))
    inner.add_special_tokens(["<s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArgumentError, match="(?s)no end token.*special tokens <s>.*--end-token"):
        TokenizerFile.from_checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match="(?s)is not in the tokenizer.*'</s>'.*such as <s>"):
        TokenizerFile.from_checkpoint(tmp_path, "</s>")
    found = installed(tmp_path / "data", TokenizerFile.from_checkpoint(tmp_path, "<s>"))
    assert found.size == 70_001 and found.dtype == np.dtype("<u4")  # ids have gaps


@pytest.mark.parametrize("name", ["none", "none/tokenizer.json", "other.json"])
def test_a_missing_or_invalid_tokenizer_is_an_error(tmp_path, name):
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ArgumentError, match="(?s)tokenizer does not exist") as raised:
        TokenizerFile.from_checkpoint(tmp_path / name)
    assert ("rename" in str(raised.value)) == (name == "other.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="invalid tokenizer.json"):
        TokenizerFile.from_checkpoint(tmp_path)


def test_training_gives_the_size_and_repeats_exactly(tmp_path):
    file = TokenizerFile.train(iter(TEXTS), 300)
    assert file.content == TokenizerFile.train(iter(TEXTS), 300).content
    found = installed(tmp_path / "data", file)
    assert (found.size, found.end_id) == (300, 0)
    assert found.tokenizer.inner.id_to_token(0) == file.end_token == END
    tokens = found.encode(TEXTS)
    assert sum(map(len, tokens)) < 0.8 * sum(map(len, TEXTS))
    assert [found.tokenizer.decode(one) for one in tokens] == TEXTS
    odd = "no such letters: \N{SNOWMAN} \x00 \r\n\t  é"
    assert found.tokenizer.decode(found.encode([odd])[0]) == odd
    short = TokenizerFile.train(iter(["aa aa aa"]), 1000)
    assert 257 <= installed(tmp_path / "short", short).size < 265


def test_ordinary_text_trains_the_tokenizer_that_the_library_trains():
    texts = ["It's a line of words, 12 of them.\n\n  Indented   and so on. " * 30] * 3
    expected = tokenizers.ByteLevelBPETokenizer()
    expected.train_from_iterator(texts, 280, min_frequency=0, special_tokens=[END])
    found = tokenizers.Tokenizer.from_buffer(TokenizerFile.train(iter(texts), 280).content)
    assert found.get_vocab() == expected.get_vocab() and len(found.get_vocab()) == 280


def test_a_missing_library_names_the_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"xsake\[train\]"):
        TokenizerFile.train(iter(TEXTS), 300)


@hypothesis.given(st.lists(st.tuples(st.sampled_from("a \n."), st.integers(1, 30)), max_size=30))
def test_only_long_runs_are_split(runs):
    text = "".join(letter * count for letter, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_data, "MAX_WORD_CHARS", 20)
        patch.setattr(build_data, "_LONG_RUN", re.compile(r"\S{20}|\s{20}"))
        parts = list(build_data.split_long_runs(text))
    assert "".join(parts) == text
    assert all(len(run) <= 20 for part in parts for run in re.findall(r"\S+|\s+", part))
    longest = max((len(run) for run in re.findall(r"\S+|\s+", text)), default=0)
    assert len(parts) == 1 or longest >= 20


def test_training_takes_no_longer_for_words_without_an_end():
    rng = np.random.default_rng(0)
    letters = "".join(rng.choice(list("ACGT"), 100_000))
    seconds = []
    for text in (re.sub("(.{10})", r"\1 ", letters), letters):
        start = time.process_time()
        TokenizerFile.train(iter([text]), 400)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 10 * seconds[0] + 0.5
