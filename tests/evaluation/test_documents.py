"""Texts into documents and windows: exact, named, and honest about what was left out."""

import json

import numpy as np
import pytest

from tests.evaluation import sample
from xsake.errors import ArgumentError
from xsake.evaluation import documents, read_texts
from xsake.evaluation.trial import TokenizedTexts, cut_windows


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


SEPARATED = "one <|endoftext|> still one\n<|endoftext|>\n\n<|endoftext|>\ntwo\n\n<|endoftext|>"
WHOLE = " \n = Title = \r\n\n last line \n"
LINES = [{"text": "one", "title": "T", "id": 3}, {"text": "two", "id": 4}, {"text": " "}]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", WHOLE, [(WHOLE, None)]),
        ("a.raw", WHOLE, [(WHOLE, None)]),
        ("a.txt", SEPARATED, [("one <|endoftext|> still one", None), ("two\n", None)]),
        ("a.jsonl", "\n\n".join(map(json.dumps, LINES)), [("one", "T"), ("two", "4")]),
    ],
)
def test_files_are_split_into_documents_exactly_as_they_are(tmp_path, name, content, expected):
    found = read_texts([written(tmp_path / name, content)])
    assert [(document.text, document.title) for document in found.documents] == expected
    assert found.files[0].documents == len(expected)


def test_names_are_stable_and_tell_texts_apart(tmp_path):
    path = written(tmp_path / "a.txt", "one\n<|endoftext|>\ntwo")
    first, second = (document.name for document in read_texts([path]).documents)
    assert first.startswith("a.txt#1-") and second.startswith("a.txt#2-")
    assert [document.name for document in read_texts([path]).documents] == [first, second]
    written(path, "other\n<|endoftext|>\ntwo")
    assert read_texts([path]).documents[0].name != first


def test_a_folder_gives_its_txt_files_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        written(tmp_path / name, name)
    found = read_texts([tmp_path])
    assert [document.text for document in found.documents] == ["a.txt", "b.txt"]
    assert [file.name for file in found.files] == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"good\nbad \xff byte", "(?s)not UTF-8.*a.txt, line 2: byte 0xff at 9"),
        ("a.txt", " \n ", "no text"),
        ("a.pdf", "x", r"(?s)unknown type.*\.jsonl"),
        ("a.jsonl", '{"text": "x"}\n{"text": 3}', "(?s)invalid .jsonl document.*line 2"),
        ("a.jsonl", '{"text"', "line 1"),
        ("a.jsonl", "[" * 100_000, "line 1"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, name, content, words):
    with pytest.raises(ArgumentError, match=words):
        read_texts([written(tmp_path / name, content)])


def test_missing_large_and_repeated_texts_are_refused(tmp_path, monkeypatch):
    for missing in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ArgumentError, match="XSK-102.text-not-found"):
            read_texts([missing])
    path = written(tmp_path / "a.txt", "12345")
    with pytest.raises(ArgumentError, match="XSK-102.duplicate-text"):
        read_texts([path, path])
    monkeypatch.setattr(documents, "MAX_BYTES", 4)
    with pytest.raises(ArgumentError, match="XSK-102.texts-too-large"):
        read_texts([path])


def library(*lengths, opening=(), vocabulary=256):
    return TokenizedTexts(sample.texts(*lengths).documents, sample.encode, vocabulary, opening)


def test_windows_are_consecutive_from_the_start_of_documents_that_are_long_enough():
    books = library(40, 10, 64, 15)
    cut = cut_windows(books, 16, per_document=3)
    assert [trial.document for trial in cut.trials] == ["text#0"] * 2 + ["text#2"] * 3
    assert (cut.too_short, len(cut.documents)) == (2, 2)
    whole = books.tokens(books.documents[2])
    read = np.concatenate([trial.tokens for trial in cut.trials[2:]])
    np.testing.assert_array_equal(read, whole[:48])


def test_a_limit_takes_the_first_that_are_long_enough():
    cut = cut_windows(library(10, 40, 40, 5), 16, limit=1)
    assert [document.name for document in cut.documents] == ["text#1"]
    assert cut.too_short == 1


def test_every_window_begins_with_the_opening():
    books = library(40, opening=(7, 8))
    trials = cut_windows(books, 16, per_document=9).trials
    assert [len(trial.tokens) for trial in trials] == [16, 16]
    assert all(trial.tokens[:2].tolist() == [7, 8] for trial in trials)
    text = np.concatenate([trial.tokens[2:] for trial in trials])
    np.testing.assert_array_equal(text, books.tokens(books.documents[0])[:28])


def test_tokens_that_the_model_does_not_know_are_refused():
    with pytest.raises(ArgumentError, match="(?s)exceed the model.s vocabulary.*ids below 50"):
        cut_windows(library(40, vocabulary=50), 16)
