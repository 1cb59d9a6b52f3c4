"""A build: exact tokens, the same bytes every time, and nothing half done that reads as whole."""

import errno
import hashlib
import itertools
import json

import numpy as np
import pytest

from tests.training.data_sample import END, files_of, letters, save_texts, save_tokenizer
from xsake.errors import ArgumentError
from xsake.model.tokenizer import Tokenizer
from xsake.training import data
from xsake.training.data import BuildSettings, build, corpus, shards
from xsake.training.data.vocabulary import TokenizerFile, Vocabulary

SMALL = BuildSettings(shard_tokens=300, validation=0.2)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    texts = save_texts(folder / "texts.txt", letters(60))
    return save_tokenizer(folder / "tokenizer"), [texts]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Documents have several pieces, and pieces come in several lots."""
    monkeypatch.setattr(corpus, "MAX_PIECE_CHARS", 40)
    monkeypatch.setattr("xsake.training.data.building.MAX_PIECE_CHARS", 250)


def stream(folder, split):
    index = data.read_index(folder)
    files = sorted(folder.glob(f"{split}-*.bin"))
    sizes = [shard.tokens for shard in index.split(split).shards]
    found = [np.fromfile(file, f"<{'u2' if index.dtype == 'uint16' else 'u4'}") for file in files]
    assert sizes == [len(one) for one in found]
    return np.concatenate(found) if found else np.zeros(0, np.uint16)


def documents_of(folder, split):
    tokenizer, index = Tokenizer.load(folder), data.read_index(folder)
    tokens = stream(folder, split)
    ends = np.flatnonzero(tokens == index.tokenizer.end_id)
    assert ends[-1] == len(tokens) - 1
    return [tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]


def test_the_files_hold_every_document_with_an_end(inputs, tmp_path):
    tokenizer, texts = inputs
    built = build(tokenizer, texts, tmp_path / "data", SMALL)
    index = built.index
    assert built.is_new and index == data.read_index(tmp_path / "data")
    found = {split: documents_of(tmp_path / "data", split) for split in ("train", "validation")}
    expected = {"train": [], "validation": []}
    for text in letters(60):
        expected[corpus.assign_split(text, 0.2)].append(text)
    assert found == expected and len(found["validation"]) > 5
    for split, documents in found.items():
        assert index.split(split).documents == len(documents)
        assert index.split(split).tokens == sum(len(text) + 1 for text in documents)


def test_the_index_says_what_was_used(inputs, tmp_path):
    tokenizer, (text,) = inputs
    index = build(tokenizer, [text], tmp_path / "data", SMALL).index
    sizes = [shard.tokens for shard in index.splits.train.shards]
    assert len(sizes) > 3 and set(sizes[:-1]) == {300} and 0 < sizes[-1] <= 300
    for number, shard in enumerate(index.splits.train.shards):
        content = (tmp_path / f"data/train-{number:05d}.bin").read_bytes()
        assert shard.blake2b == hashlib.blake2b(content, digest_size=32).hexdigest()
    content = (tokenizer / "tokenizer.json").read_bytes()
    assert index.tokenizer.sha256 == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "data/tokenizer.json").read_bytes() == content
    assert (index.tokenizer.vocabulary, index.tokenizer.end_id, index.dtype) == (257, 256, "uint16")
    (source,) = index.sources
    assert source.sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert (source.name, source.documents, source.bytes) == ("texts.txt", 60, text.stat().st_size)
    assert index.versions.keys() == {"tokenizers", "xsake"}


def test_an_index_without_skipped_documents_is_as_version_0_1_0_wrote_it(inputs, tmp_path):
    build(*inputs, tmp_path / "data", SMALL)
    assert "skipped" not in json.loads((tmp_path / "data" / "index.json").read_text())


def test_large_vocabularies_take_four_bytes(inputs, tmp_path):
    tokenizer = save_tokenizer(tmp_path / "large", more=70_000)
    index = build(tokenizer, inputs[1], tmp_path / "data", SMALL).index
    assert index.dtype == "uint32" and index.tokenizer.end_id == 70_256
    assert documents_of(tmp_path / "data", "train")
    assert data.Windows(tmp_path / "data", context=16).read(np.arange(3)).max() <= 70_256


def test_the_same_gives_the_same_bytes(inputs, tmp_path):
    tokenizer, texts = inputs
    for name in ("one", "other"):
        build(tokenizer, texts, tmp_path / name, SMALL)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "other")
    build(tokenizer, texts, tmp_path / "large", BuildSettings(validation=0.2))
    np.testing.assert_array_equal(
        stream(tmp_path / "one", "train"), stream(tmp_path / "large", "train")
    )


def test_a_shard_can_be_smaller_than_a_document(inputs, tmp_path):
    tokenizer, texts = inputs
    build(tokenizer, texts, tmp_path / "data", BuildSettings(shard_tokens=29, validation=0.2))
    build(tokenizer, texts, tmp_path / "other", SMALL)
    np.testing.assert_array_equal(
        stream(tmp_path / "data", "train"), stream(tmp_path / "other", "train")
    )


def test_without_a_share_there_is_no_validation(inputs, tmp_path):
    tokenizer, texts = inputs
    index = build(tokenizer, texts, tmp_path / "data", BuildSettings(validation=0.0)).index
    assert index.splits.train.documents == 60 and index.splits.validation.shards == ()


def test_a_document_that_spells_the_end_does_not_end(tmp_path, inputs):
    path = save_texts(tmp_path / "a.txt", [f"before {END} after", "second"])
    build(inputs[0], [path], tmp_path / "data", BuildSettings(validation=0.0))
    assert documents_of(tmp_path / "data", "train") == [f"before {END} after", "second"]


class Stop(Exception):
    pass


def stop_at(call):
    """Something to watch with that stops the build at its n-th call."""
    calls = iter(range(call + 1))

    def watch(progress):
        if next(calls) == call:
            raise Stop

    return watch


def calls_of(tokenizer, texts, folder):
    seen = []
    build(tokenizer, texts, folder, SMALL, on_progress=seen.append)
    return seen


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_build_that_is_stopped_anywhere_goes_on_to_the_same_bytes(inputs, tmp_path, is_trained):
    tokenizer, texts = inputs
    source = data.NewTokenizer(270) if is_trained else tokenizer
    count = len(calls_of(source, texts, tmp_path / "straight"))
    assert count > 10
    straight = files_of(tmp_path / "straight")
    for call in range(0, count, 5 if is_trained else 1):
        folder = tmp_path / f"stopped {call}"
        with pytest.raises(Stop):
            build(source, texts, folder, SMALL, on_progress=stop_at(call))
        with pytest.raises(ArgumentError, match=r"has no data|was interrupted"):
            data.read_index(folder)
        built = build(source, texts, folder, SMALL)
        assert built.is_new and files_of(folder) == straight


def test_a_build_that_is_stopped_again_and_again_is_done_in_the_end(inputs, tmp_path):
    tokenizer, texts = inputs
    straight = build(tokenizer, texts, tmp_path / "straight", SMALL).index
    folder, stops = tmp_path / "data", 0
    while True:
        written = len(list(folder.glob("*.bin")))

        def stop_after_one(progress, already=written):
            if progress.finished is not None and len(list(folder.glob("*.bin"))) > already:
                raise Stop

        try:
            built = build(tokenizer, texts, folder, SMALL, on_progress=stop_after_one)
            break
        except Stop:
            stops += 1
    assert stops > 3 and built.index == straight
    assert files_of(folder) == files_of(tmp_path / "straight")


def test_finished_files_are_kept_and_their_texts_are_not_read_again(inputs, tmp_path, monkeypatch):
    tokenizer, texts = inputs
    seen = calls_of(tokenizer, texts, tmp_path / "straight")
    late = max(i for i, progress in enumerate(seen) if progress.finished is not None) - 2
    with pytest.raises(Stop):
        build(tokenizer, texts, tmp_path / "data", SMALL, on_progress=stop_at(late))
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("train-*.bin")}
    encoded, encode = [], Vocabulary.encode
    monkeypatch.setattr(
        Vocabulary, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts)
    )
    built = build(tokenizer, texts, tmp_path / "data", SMALL)
    assert built.kept >= len(kept) > 3 and built.rewritten == 0
    assert all(path.stat().st_mtime_ns == before for path, before in kept.items())
    everything = sum(map(len, letters(60)))
    assert 0 < sum(map(len, encoded)) < 0.5 * everything
    assert files_of(tmp_path / "data") == files_of(tmp_path / "straight")


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_of_an_earlier_run_is_written_again(inputs, tmp_path, damage):
    tokenizer, texts = inputs
    count = len(calls_of(tokenizer, texts, tmp_path / "straight"))
    folder = tmp_path / "data"
    with pytest.raises(Stop):
        build(tokenizer, texts, folder, SMALL, on_progress=stop_at(count - 1))
    path = folder / "train-00001.bin"
    content = bytearray(path.read_bytes())
    content[3] ^= 4
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(content if damage == "flip" else content[:-2])
    built = build(tokenizer, texts, folder, SMALL)
    assert built.rewritten > 0 and built.kept > 0
    assert files_of(folder) == files_of(tmp_path / "straight")


def test_a_killed_process_leaves_nothing_in_the_way(inputs, tmp_path):
    """Half a line in the list of steps, a file beside its final name, and a shard not listed."""
    tokenizer, texts = inputs
    build(tokenizer, texts, tmp_path / "straight", SMALL)
    folder = tmp_path / "data"
    with pytest.raises(Stop):
        build(tokenizer, texts, folder, SMALL, on_progress=stop_at(9))
    steps = folder / "building.jsonl"
    steps.write_bytes(steps.read_bytes()[:-9])
    (folder / ".train-00004.bin.ab12_cd9").write_bytes(b"half")
    built = build(tokenizer, texts, folder, SMALL)
    assert built.kept >= 0
    assert files_of(folder) == files_of(tmp_path / "straight")


def test_a_full_disk_costs_the_file_that_did_not_fit(inputs, tmp_path, monkeypatch):
    tokenizer, texts = inputs
    build(tokenizer, texts, tmp_path / "straight", SMALL)
    write, left = shards.atomic_write, iter([True] * 3 + [False])

    def fill(path, content):
        if not next(left):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "atomic_write", fill)
        with pytest.raises(OSError, match="No space"):
            build(tokenizer, texts, tmp_path / "data", SMALL)
    assert build(tokenizer, texts, tmp_path / "data", SMALL).kept == 3
    assert files_of(tmp_path / "data") == files_of(tmp_path / "straight")


def test_what_is_built_is_checked_and_not_built_again(inputs, tmp_path, monkeypatch):
    tokenizer, texts = inputs
    build(tokenizer, texts, tmp_path / "data", SMALL)
    before = files_of(tmp_path / "data")
    with monkeypatch.context() as patch:
        patch.setattr(Vocabulary, "encode", None)
        built = build(tokenizer, texts, tmp_path / "data", SMALL)
    assert not built.is_new and built.kept == len(list((tmp_path / "data").glob("*.bin")))
    (tmp_path / "data/validation-00000.bin").write_bytes(b"00")
    with pytest.raises(ArgumentError, match="(?s)truncated.*validation-00000.bin.*--no-resume"):
        build(tokenizer, texts, tmp_path / "data", SMALL)
    assert build(tokenizer, texts, tmp_path / "data", SMALL, overwrite=True).is_new
    assert files_of(tmp_path / "data") == before


@pytest.mark.parametrize("is_complete", [False, True])
def test_other_data_is_not_overwritten_unless_asked(inputs, tmp_path, is_complete):
    tokenizer, texts = inputs
    folder = tmp_path / "data"
    if is_complete:
        build(tokenizer, texts, folder, SMALL)
    else:
        with pytest.raises(Stop):
            build(tokenizer, texts, folder, SMALL, on_progress=stop_at(8))
    before = files_of(folder)
    more = save_texts(tmp_path / "more.txt", letters(30, seed=9))
    others = [
        (tokenizer, [more], SMALL),
        (tokenizer, texts, BuildSettings(shard_tokens=100, validation=0.2)),
        (tokenizer, texts, BuildSettings(shard_tokens=300, validation=0.1)),
        (tokenizer, texts, BuildSettings(shard_tokens=300, validation=0.2, end_token="a")),
        (data.NewTokenizer(300), texts, SMALL),
    ]
    for source, paths, settings in others:
        with pytest.raises(ArgumentError, match="(?s)holds another build.*--no-resume"):
            build(source, paths, folder, settings)
    assert files_of(folder) == before
    build(tokenizer, [more], folder, SMALL, overwrite=True)
    build(tokenizer, [more], tmp_path / "new", SMALL)
    assert files_of(folder) == files_of(tmp_path / "new")


@pytest.mark.parametrize("fresh", [False, True])
def test_folders_of_others_are_not_touched(inputs, tmp_path, fresh):
    tokenizer, texts = inputs
    folder = save_tokenizer(tmp_path / "checkpoint")
    (folder / "tokenizer_config.json").write_text("{}")
    before = files_of(folder)
    with pytest.raises(ArgumentError, match="(?s)not empty.*tokenizer.json.*another folder"):
        build(tokenizer, texts, folder, SMALL, overwrite=fresh)
    (folder / "index.json").write_text("{}")
    with pytest.raises(ArgumentError):
        build(tokenizer, texts, folder, SMALL, overwrite=fresh)
    assert files_of(folder) == before | {"index.json": b"{}"}


def test_a_lost_index_is_made_again_only_when_asked(inputs, tmp_path):
    tokenizer, texts = inputs
    build(tokenizer, texts, tmp_path / "data", SMALL)
    before = files_of(tmp_path / "data")
    for content in (None, "{"):
        (tmp_path / "data/index.json").unlink()
        if content is not None:
            (tmp_path / "data/index.json").write_text(content)
        with pytest.raises(ArgumentError, match="not empty|not an index"):
            build(tokenizer, texts, tmp_path / "data", SMALL)
        build(tokenizer, texts, tmp_path / "data", SMALL, overwrite=True)
        assert files_of(tmp_path / "data") == before


def test_a_trained_tokenizer_learns_from_train_documents_and_stays(inputs, tmp_path):
    _, texts = inputs
    index = build(data.NewTokenizer(300), texts, tmp_path / "data", SMALL).index
    assert (index.tokenizer.vocabulary, index.tokenizer.asked_vocabulary) == (300, 300)
    assert (index.tokenizer.end_token, index.tokenizer.end_id) == (END, 0)
    train = [text for text in letters(60) if corpus.assign_split(text, 0.2) == "train"]
    assert documents_of(tmp_path / "data", "train") == train
    expected = TokenizerFile.train(iter(train), 300)
    assert index.tokenizer.sha256 == expected.sha256


def test_an_interrupted_build_does_not_train_twice(inputs, tmp_path, monkeypatch):
    _, texts = inputs
    source, folder = data.NewTokenizer(300), tmp_path / "data"
    with pytest.raises(Stop):
        build(source, texts, folder, SMALL, on_progress=stop_at(6))
    with monkeypatch.context() as patch:
        patch.setattr(TokenizerFile, "train", None)
        build(source, texts, folder, SMALL)
    build(source, texts, tmp_path / "straight", SMALL)
    assert files_of(folder) == files_of(tmp_path / "straight")


def test_files_made_from_a_text_that_changed_are_not_kept(inputs, tmp_path, monkeypatch):
    tokenizer, (path,) = inputs
    texts = tmp_path / "texts.txt"
    texts.write_bytes(path.read_bytes())
    started = data.building.Corpus.read

    def read(self):
        texts.write_text(texts.read_text().replace("a", "b"))
        yield from started(self)

    with monkeypatch.context() as patch:
        patch.setattr(data.building.Corpus, "read", read)
        with pytest.raises(ArgumentError, match="(?s)changed during the build.*--no-resume"):
            build(tokenizer, [texts], tmp_path / "data", SMALL)
    texts.write_bytes(path.read_bytes())
    with pytest.raises(ArgumentError, match="holds other files than a build"):
        build(tokenizer, [texts], tmp_path / "data", SMALL)
    build(tokenizer, [texts], tmp_path / "data", SMALL, overwrite=True)
    build(tokenizer, [path], tmp_path / "whole", SMALL)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "whole")


def test_files_of_a_tokenizer_that_is_lost_do_not_count(inputs, tmp_path, monkeypatch):
    """Were training ever to give another tokenizer, its tokens must not join the old ones."""
    _, texts = inputs
    source, folder = data.NewTokenizer(300), tmp_path / "data"
    with pytest.raises(Stop):
        build(source, texts, folder, SMALL, on_progress=stop_at(9))
    (folder / "tokenizer.json").write_text("{}")
    other = TokenizerFile.train(iter(["other text"] * 9), 300)
    with monkeypatch.context() as patch:
        patch.setattr(TokenizerFile, "train", lambda texts, vocabulary: other)
        built = build(source, texts, folder, SMALL)
    assert built.kept == 0 and built.index.tokenizer.sha256 == other.sha256
    train = [text for text in letters(60) if corpus.assign_split(text, 0.2) == "train"]
    assert documents_of(folder, "train") == train


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shard_tokens": 0}, "size of a shard is out of range"),
        ({"shard_tokens": 2**31}, "size of a shard is out of range"),
        ({"validation": 1.0}, "validation share is out of range"),
        ({"validation": -0.1}, "validation share is out of range"),
        ({"validation": float("nan")}, "validation share is out of range"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, words):
    with pytest.raises(ArgumentError, match=words):
        BuildSettings(**changes)


def test_a_new_tokenizer_has_its_own_end(inputs, tmp_path):
    with pytest.raises(ArgumentError, match="remove --end-token"):
        build(data.NewTokenizer(300), inputs[1], tmp_path / "data", BuildSettings(end_token="a"))


def test_progress_is_told(inputs, tmp_path):
    tokenizer, texts = inputs
    seen = calls_of(tokenizer, texts, tmp_path / "data")
    assert seen[0].doing == "reading texts.txt"
    making = [progress for progress in seen if progress.doing == "tokenizing"]
    assert all(a.done <= b.done and a.tokens <= b.tokens for a, b in itertools.pairwise(making))
    assert making[-1].done == making[-1].total > 60
    finished = [progress.finished for progress in seen if progress.finished is not None]
    assert len(finished) == len(list((tmp_path / "data").glob("*.bin")))
