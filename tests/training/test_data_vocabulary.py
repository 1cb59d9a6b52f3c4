"""The tokenizer of a data folder: no end token documents, and training that repeats."""

import json
import re
import sys
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tokenizers

from tests.training.data_sample import END, letters, save_tokenizer
from xsake.errors import ArgumentError, CheckpointError, MissingExtraError
from xsake.model.tokenizer import Tokenizer
from xsake.training.data import vocabulary
from xsake.training.data.vocabulary import NewTokenizer, TokenizerFile, Vocabulary

TEXTS = [text * 3 for text in letters(200, seed=1)]


@pytest.fixture
def folder(tmp_path):
    return save_tokenizer(tmp_path / "checkpoint")


def installed(folder, file):
    folder.mkdir(exist_ok=True)
    file.install(folder)
    return Vocabulary(folder)


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_checkpoint_is_named_by_its_folder_or_its_file(folder, tmp_path, name):
    file = TokenizerFile.from_checkpoint(folder / name)
    assert file.content == (folder / "tokenizer.json").read_bytes() and file.end_token == END
    found = installed(tmp_path / "data", file)
    assert (found.size, found.end_id, found.dtype) == (257, 256, np.dtype("<u2"))
    assert Tokenizer.load(tmp_path / "data").end_ids == (256,)


def test_what_a_text_spells_is_text(folder, tmp_path):
    found = installed(tmp_path / "data", TokenizerFile.from_checkpoint(folder))
    text = f"one {END} two"
    (tokens,) = found.encode([text])
    assert found.end_id not in tokens and len(tokens) == len(text)
    assert found.tokenizer.decode(tokens) == text


def test_texts_become_the_tokens_that_the_checkpoint_makes(folder, tmp_path):
    found = installed(tmp_path / "data", TokenizerFile.from_checkpoint(folder))
    theirs = Tokenizer.load(folder)
    for text, tokens in zip(TEXTS[:20], found.encode(TEXTS[:20]), strict=True):
        np.testing.assert_array_equal(tokens, theirs.encode(text))


def test_the_end_is_what_the_checkpoint_says(folder):
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 65}))
    word = TokenizerFile.from_checkpoint(folder).end_token
    assert Tokenizer.load(folder).inner.token_to_id(word) == 65
    # Several ends, as models of many turns have them: the usual name decides.
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [65, 66]}))
    assert TokenizerFile.from_checkpoint(folder).end_token == END
    assert TokenizerFile.from_checkpoint(folder, "a").end_token == "a"


def test_an_end_that_nobody_names_has_to_be_named(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    inner.add_special_tokens(["<s>"])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArgumentError, match="(?s)no end token.*special tokens <s>.*--end-token"):
        TokenizerFile.from_checkpoint(tmp_path)
    with pytest.raises(ArgumentError, match="(?s)is not in the tokenizer.*'</s>'.*such as <s>"):
        TokenizerFile.from_checkpoint(tmp_path, "</s>")
    assert TokenizerFile.from_checkpoint(tmp_path, "<s>").end_token == "<s>"


def test_ids_with_holes_still_fit(tmp_path):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 70_000}, []))
    inner.add_special_tokens([END])
    inner.save(str(tmp_path / "tokenizer.json"))
    found = installed(tmp_path / "data", TokenizerFile.from_checkpoint(tmp_path))
    assert found.size == 70_001 and found.dtype == np.dtype("<u4")


@pytest.mark.parametrize("name", ["none", "none/tokenizer.json", "other.json"])
def test_what_is_no_tokenizer_is_refused(tmp_path, name):
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


def test_short_texts_give_fewer_tokens(tmp_path):
    file = TokenizerFile.train(iter(["aa aa aa"]), 1000)
    assert 257 <= installed(tmp_path / "data", file).size < 265


@pytest.mark.parametrize("size", [0, 256, 2**30])
def test_a_vocabulary_has_room_for_every_byte_and_an_end(size):
    with pytest.raises(ArgumentError, match="(?s)out of range.*257"):
        NewTokenizer(size)


def test_what_was_trained_before_is_known_by_its_digest(tmp_path):
    file = TokenizerFile.train(iter(TEXTS), 300)
    assert TokenizerFile.load_previous(tmp_path, file.sha256) is None
    file.install(tmp_path)
    assert TokenizerFile.load_previous(tmp_path, file.sha256) == file
    assert TokenizerFile.load_previous(tmp_path, None) is None
    (tmp_path / "tokenizer.json").write_bytes(file.content[:-1])
    assert TokenizerFile.load_previous(tmp_path, file.sha256) is None


def test_without_tokenizers_the_install_command_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"xsake\[train\]"):
        TokenizerFile.train(iter(TEXTS), 300)


@hypothesis.given(st.lists(st.tuples(st.sampled_from("a \n."), st.integers(1, 30)), max_size=30))
def test_only_long_runs_are_split(runs):
    text = "".join(letter * count for letter, count in runs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary, "MAX_WORD_CHARS", 20)
        patch.setattr(vocabulary, "_LONG_RUN", re.compile(r"\S{20}|\s{20}"))
        parts = list(vocabulary.split_long_runs(text))
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


def test_ordinary_text_trains_the_tokenizer_that_the_library_trains():
    texts = ["It's a line of words, 12 of them.\n\n  Indented   and so on. " * 30] * 3
    expected = tokenizers.ByteLevelBPETokenizer()
    expected.train_from_iterator(texts, 280, min_frequency=0, special_tokens=[END])
    found = tokenizers.Tokenizer.from_buffer(TokenizerFile.train(iter(texts), 280).content)
    assert found.get_vocab() == expected.get_vocab() and len(found.get_vocab()) == 280
