"""Texts on their way to tokens: checked first, split by document, cut where nothing is lost."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.training.data_sample import END, letters, save_texts
from xsake.errors import ArgumentError
from xsake.training.data import corpus
from xsake.training.data.corpus import Corpus, pieces_of, split_of


@hypothesis.given(st.text(alphabet="ab \n", max_size=200), st.integers(1, 20))
def test_pieces_are_the_text(text, longest):
    pieces = list(pieces_of(text, longest))
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
    assert list(pieces_of(text, longest)) == pieces


def test_the_share_of_validation_is_met_and_grows_without_moving_anything():
    texts = [f"text {i}" for i in range(4000)]
    small, large = (
        {text for text in texts if split_of(text, share) == "validation"} for share in (0.05, 0.2)
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
    monkeypatch.setattr(corpus, "LONGEST_PIECE", 16)
    path = save_texts(tmp_path / "a.txt", letters(40))
    found = Corpus.survey([path], 0.3)
    pieces = list(found.read())
    assert found.pieces == len(pieces) > 40 == sum(piece.is_last for piece in pieces)
    for split in ("train", "validation"):
        ends = [piece for piece in pieces if piece.split == split and piece.is_last]
        assert found.documents[split] == len(ends) > 0
    train = "".join(piece.text for piece in pieces if piece.split == "train")
    assert "".join(found.training_texts()) == train


def test_many_files_are_read_a_portion_at_a_time(tmp_path, monkeypatch):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"text {number} of nine letters")
    (folder / "empty.txt").write_text(" ")
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "a line"}))
    paths = [folder, tmp_path / "more.jsonl"]
    whole = Corpus.survey(paths, 0.0)
    monkeypatch.setattr(corpus, "PORTION_BYTES", 60)
    named = []
    found = Corpus.survey(paths, 0.0, named.append)
    assert len(whole.portions) == 1 and [len(portion) for portion in found.portions] == [2, 2, 3]
    assert named == ["0.txt", "2.txt", "4.txt"]
    assert found.files == whole.files and list(found.read()) == list(whole.read())


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda folder: [folder / "none.txt"], "no such text"),
        (lambda folder: [folder], "no such text"),
        (lambda folder: [save_texts(folder / "a.txt", ["x"])] * 2, "given twice"),
        (lambda folder: [save_texts(folder / "a.txt", ["\x00" * 9]), folder], "given twice"),
        (lambda folder: [save_texts(folder / "a.txt", [" ", "\n"])], "no text"),
    ],
)
def test_texts_that_cannot_be_read_are_refused(tmp_path, write, words):
    with pytest.raises(ArgumentError, match=words):
        Corpus.survey(write(tmp_path), 0.0)


def test_half_a_character_is_refused_by_document(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": "bad \\ud83d here"}')
    with pytest.raises(ArgumentError, match=r"(?s)half a character.*a\.jsonl#2.*U\+D83D"):
        Corpus.survey([path], 0.0)


def test_the_same_text_in_two_portions_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "PORTION_BYTES", 1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_texts(tmp_path / name / "x.txt", ["same"])
    with pytest.raises(ArgumentError, match="same name and the same text"):
        Corpus.survey([tmp_path / "a", tmp_path / "b"], 0.0)


def test_training_needs_a_document(tmp_path):
    path = save_texts(tmp_path / "a.txt", ["only one"])
    with pytest.raises(ArgumentError, match="(?s)left for training.*--validation"):
        Corpus.survey([path], 0.9999999)


def test_a_text_that_changes_between_two_readings_is_refused(tmp_path):
    path = save_texts(tmp_path / "a.txt", ["one", "two"])
    found = Corpus.survey([path], 0.0)
    path.write_text(f"one\n{END}\ntwo and more")
    with pytest.raises(ArgumentError, match="(?s)was changed.*a.txt"):
        list(found.read())
