"""Texts on their way to tokens: checked first, split by document, cut where nothing is lost."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.training.data_sample import END, letters, save_texts
from xsake.errors import ArgumentError
from xsake.training.data import corpus, texts
from xsake.training.data.corpus import Corpus, assign_split, split_pieces


@hypothesis.given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 20))
def test_pieces_are_the_text(text, longest):
    pieces = list(split_pieces([text], longest))
    assert list(split_pieces(text, longest)) == pieces, "wherever its parts were cut"
    assert "".join(pieces) == text
    assert all(len(piece) <= longest for piece in pieces) and all(pieces[:-1])


@pytest.mark.parametrize(
    ("text", "longest", "pieces"),
    [
        ("one\ntwo three", 10, ["one\n", "two three"]),
        ("one\n\ntwo three", 10, ["one\n\ntwo", " three"]),
        ("one two", 4, ["one", " two"]),
        ("one  two", 6, ["one  t", "wo"]),
        ("abcdefg", 3, ["abc", "def", "g"]),
        ("", 3, [""]),
    ],
)
def test_cuts_are_behind_lines_or_before_words(text, longest, pieces):
    assert list(split_pieces([text], longest)) == pieces


def test_the_share_of_validation_is_met_and_grows_without_moving_anything():
    texts = [f"text {i}" for i in range(4000)]
    small, large = (
        {text for text in texts if assign_split(text, share) == "validation"}
        for share in (0.05, 0.2)
    )
    assert 150 < len(small) < 250 and 700 < len(large) < 900 and small < large


def test_a_document_is_on_the_same_side_wherever_it_lies(tmp_path):
    documents = letters(60)
    one = save_texts(tmp_path / "one.txt", documents)
    other = save_texts(tmp_path / "other.txt", documents[::-1])
    sides = [
        {piece.text.removesuffix("\n"): piece.split for piece in Corpus.survey([path], 0.3).read()}
        for path in (one, other)
    ]
    assert sides[0] == sides[1] and set(sides[0].values()) == {"train", "validation"}


def test_a_survey_counts_what_will_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_PIECE_CHARS", 16)
    path = save_texts(tmp_path / "a.txt", letters(40))
    found = Corpus.survey([path], 0.3)
    pieces = list(found.read())
    assert found.pieces == len(pieces) > 40 == sum(piece.is_last for piece in pieces)
    for split in ("train", "validation"):
        ends = [piece for piece in pieces if piece.split == split and piece.is_last]
        assert found.documents[split] == len(ends) > 0
    train = "".join(piece.text for piece in pieces if piece.split == "train")
    assert "".join(found.training_texts()) == train


def test_files_and_folders_are_read_in_order(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"text {number} of nine letters")
    (folder / "empty.txt").write_text(" ")
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "a line"}))
    named = []
    found = Corpus.survey([folder, tmp_path / "more.jsonl"], 0.0, named.append)
    assert named == [*(f"{number}.txt" for number in range(5)), "empty.txt", "more.jsonl"]
    assert [file.documents for file in found.files] == [1, 1, 1, 1, 1, 0, 1]
    assert [piece.text for piece in found.read()][4:] == ["text 4 of nine letters", "a line"]


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: [folder / "none.txt"], "text not found"),
        (lambda folder: [folder], "text not found"),
        (lambda folder: [save_texts(folder / "a.txt", ["x"])] * 2, "given twice"),
        (lambda folder: [save_texts(folder / "a.txt", ["\x00" * 9]), folder], "given twice"),
        (lambda folder: [save_texts(folder / "a.txt", [" ", "\n"])], "have no documents"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(tmp_path, write, words):
    with pytest.raises(ArgumentError, match=words):
        Corpus.survey(write(tmp_path), 0.0)


def test_half_a_character_is_refused_by_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "bad \\ud83d here"}')
    with pytest.raises(ArgumentError, match=r"(?s)lone surrogate.*a\.jsonl, line 2.*U\+D83D"):
        Corpus.survey([path], 0.0)


def test_the_same_text_in_two_folders_is_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_texts(tmp_path / name / "x.txt", ["same"])
    with pytest.raises(ArgumentError, match="same name and the same text"):
        Corpus.survey([tmp_path / "a", tmp_path / "b"], 0.0)


def test_training_needs_a_document(tmp_path):
    path = save_texts(tmp_path / "a.txt", ["only one"])
    with pytest.raises(ArgumentError, match="(?s)train split is empty.*--validation"):
        Corpus.survey([path], 0.9999999)


def test_a_text_that_changes_between_two_readings_is_refused(tmp_path):
    path = save_texts(tmp_path / "a.txt", ["one", "two"])
    found = Corpus.survey([path], 0.0)
    path.write_text(f"one\n{END}\ntwo and more")
    with pytest.raises(ArgumentError, match="(?s)changed during the build.*a.txt"):
        list(found.read())


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_document_of_many_parts_is_read_like_a_short_one(tmp_path, monkeypatch, share):
    documents = [" ".join(letters(40, seed=seed)) for seed in range(6)] + ["short", " " * 3000]
    path = save_texts(tmp_path / "a.txt", documents)
    monkeypatch.setattr(corpus, "MAX_PIECE_CHARS", 10**6)
    short = Corpus.survey([path], share)
    assert not short.long
    expected = [(piece.text, piece.split) for piece in short.read()]
    monkeypatch.setattr(corpus, "MAX_PIECE_CHARS", 100)
    monkeypatch.setattr(texts, "CHUNK_BYTES", 64)
    long = Corpus.survey([path], share)
    assert len(long.long) == 7 and long.files == short.files and long.documents == short.documents
    joined, whole = [], ""
    for piece in long.read():
        whole += piece.text
        if piece.is_last:
            joined.append((whole, piece.split))
            whole = ""
    assert joined == expected
    assert long.pieces == sum(1 for _ in long.read()) > 60


BAD = [b"good", b"bad \xff", b"fine", b"half \xc3", b"end"]


@pytest.mark.parametrize("chunk", [1, 5, 2**20])
def test_documents_that_are_not_utf8_are_skipped_and_counted_if_asked(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(texts, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n<|endoftext|>\n".join(BAD))
    with pytest.raises(ArgumentError, match="(?s)not UTF-8.*line 3: byte 0xff at 23.*--invalid"):
        Corpus.survey([path], 0.0)
    found = Corpus.survey([path], 0.0, invalid="skip")
    assert [piece.text for piece in found.read()] == ["good", "fine", "end"]
    (skipped,) = found.skipped
    assert (skipped.name, skipped.documents) == (
        "a.txt",
        2,
    ) and "line 3: byte 0xff" in skipped.first
    assert found.documents["train"] == found.files[0].documents == 3


def test_lines_that_are_no_documents_are_skipped_and_counted_if_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "MAX_LINE_BYTES", 60)
    monkeypatch.setattr(texts, "CHUNK_BYTES", 16)
    lines = [
        b'{"text": "good"}',
        b'{"text": "\xff"}',
        b'{"text": 3}',
        b"[",
        b"",
        b'{"text": "\\ud83d"}',
    ]
    lines += [b'{"text": "%s"}' % (b"x" * 99), b'{"text": " "}', b'{"text": "end"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    found = Corpus.survey([path], 0.0, invalid="skip")
    assert [piece.text for piece in found.read()] == ["good", "end"]
    assert found.skipped[0].documents == 5
    for bad in lines[1], lines[2], lines[3], lines[5], lines[6]:
        path.write_bytes(lines[0] + b"\n" + bad)
        with pytest.raises(ArgumentError, match=r"(?s)a\.jsonl, line 2.*--invalid skip"):
            Corpus.survey([path], 0.0)
