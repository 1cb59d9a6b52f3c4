"""Texts on their way to tokens: streamed, checked first, split by document, cut without loss."""

import hashlib
import json
import tracemalloc

import hypothesis
import hypothesis.strategies as st
import pytest

from tests.training.data_sample import END, letters, save_texts, split_of
from xsake import evaluation
from xsake.errors import ArgumentError
from xsake.evaluation import read_texts
from xsake.training import corpus
from xsake.training.corpus import Corpus, TextReader, split_pieces

PARTS = ["<|endoftext|>", "\n", "\r", " ", "\t", "<|end", "a", "é", "\ufeff", "𝔘", "\u2028"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


def streamed(path):
    reader = TextReader(path)
    found = ["".join(part.text for part in parts) for _, parts in reader.documents()]
    assert reader.identity(0).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert reader.identity(0).bytes == path.stat().st_size
    return [text for text in found if text.strip()]


def whole(path):
    return [document.text for document in read_texts([path]).documents]


def texts_of(found):
    return [piece.text for piece in found.read()]


@hypothesis.given(st.lists(st.sampled_from(PARTS), max_size=40), st.integers(1, 40))
@hypothesis.example(["a", "\n", "<|endoftext|>"], 1)
@hypothesis.example(["\ufeff", "<|endoftext|>", "\n", "<|endoftext|>", " ", "\r", "\n", "a"], 2)
@hypothesis.example(["\n", "\n", "a", "\n", "\n", "\n", "<|endoftext|>", "\n", "\n", "\n"], 1)
def test_a_stream_has_the_documents_of_the_whole_file(folder, parts, chunk):
    path = folder / "a.txt"
    for end in ("\n<|endoftext|>\nlast", "\nlast\n", "\nlast\n<|endoftext|>\n"):
        path.write_text("".join(parts) + end)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "CHUNK_BYTES", chunk)
            assert streamed(path) == whole(path)


@hypothesis.given(st.lists(st.text(max_size=9), min_size=1), st.booleans(), st.booleans())
def test_lines_of_json_are_those_of_the_whole_file(folder, words, is_marked, is_ascii):
    path = folder / "a.jsonl"
    lines = [json.dumps({"text": word}, ensure_ascii=is_ascii) for word in [*words, "last"]]
    path.write_text("\n".join(lines), encoding="utf-8-sig" if is_marked else "utf-8")
    assert streamed(path) == whole(path)


def test_lines_longer_than_a_chunk_are_read_in_bounded_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 100)
    monkeypatch.setattr(corpus, "MAX_SEPARATOR_BYTES", 30)
    monkeypatch.setattr(evaluation.documents, "MAX_BYTES", 1000)  # which an evaluation could read
    path, text = tmp_path / "a.txt", "xé" * 5000
    path.write_text(f"{text}\n{END}\nlast")
    (_, parts), _ = (
        (number, [part.text for part in parts]) for number, parts in TextReader(path).documents()
    )
    assert max(map(len, parts)) <= 131 and streamed(path) == [text, "last"]


def test_a_large_file_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(2**27)
    found = Corpus([path], 0.0)
    tracemalloc.start()
    assert sum(len(piece.text) for piece in found.read()) == 2**27
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**25


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
def test_cuts_are_after_lines_or_before_words(text, longest, pieces):
    assert list(split_pieces([text], longest)) == pieces


def test_the_validation_share_grows_without_moving_a_document():
    texts = [f"text {i}" for i in range(4000)]
    small, large = (
        {text for text in texts if split_of(text, share) == "validation"} for share in (0.05, 0.2)
    )
    assert 150 < len(small) < 250 and 700 < len(large) < 900 and small < large


def test_the_split_of_a_document_does_not_depend_on_its_position(tmp_path):
    documents = letters(60)
    sides = [
        {
            piece.text: piece.split
            for piece in Corpus([save_texts(tmp_path / name, order)], 0.3).read()
        }
        for name, order in (("one.txt", documents), ("other.txt", documents[::-1]))
    ]
    assert sides[0] == sides[1] == {text: split_of(text, 0.3) for text in documents}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_long_documents_are_read_like_short_ones(tmp_path, monkeypatch, share):
    documents = [" ".join(letters(40, seed=seed)) for seed in range(6)] + ["short", " " * 3000]
    path = save_texts(tmp_path / "a.txt", documents)
    short = Corpus([path], share)
    expected = [(piece.text, piece.split) for piece in short.read()]
    assert [text for text, _ in expected] == documents[:7] and short.pieces == 7
    monkeypatch.setattr(corpus, "MAX_PIECE_CHARS", 100)
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 64)
    long = Corpus([path], share)
    assert long.files == short.files and long.documents == short.documents
    joined, text = [], ""
    for piece in long.read():
        text += piece.text
        if piece.is_last:
            joined.append((text, piece.split))
            text = ""
    assert joined == expected
    assert long.pieces == sum(1 for _ in long.read()) > 60
    train = "".join(text for text, split in expected if split == "train")
    assert "".join(long.training_texts()) == train


def test_files_and_folders_are_read_in_order(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(f"text {number} of nine letters")
    (folder / "empty.txt").write_text(" ")
    (tmp_path / "more.jsonl").write_text(json.dumps({"text": "a line"}))
    names = []
    found = Corpus([folder, tmp_path / "more.jsonl"], 0.0, names.append)
    assert names == [*(f"{number}.txt" for number in range(5)), "empty.txt", "more.jsonl"]
    assert [file.documents for file in found.files] == [1, 1, 1, 1, 1, 0, 1]
    assert texts_of(found)[4:] == ["text 4 of nine letters", "a line"]


def _same_text(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        save_texts(folder / name / "x.txt", ["same"])
    return [folder / "a", folder / "b"]


@pytest.mark.parametrize(
    ("write", "share", "words"),
    [
        (lambda folder: [folder / "none.txt"], 0.0, "text not found"),
        (lambda folder: [folder], 0.0, "text not found"),
        (lambda folder: [save_texts(folder / "a.txt", ["x"])] * 2, 0.0, "given twice"),
        (lambda folder: [save_texts(folder / "a.txt", ["\x00" * 9]), folder], 0.0, "given twice"),
        (lambda folder: [save_texts(folder / "a.txt", [" ", "\n"])], 0.0, "have no documents"),
        (_same_text, 0.0, "same name and the same text"),
        (lambda folder: [save_texts(folder / "a.txt", ["one"])], 0.9999999, "train split is empty"),
    ],
)
def test_unusable_texts_are_errors(tmp_path, write, share, words):
    with pytest.raises(ArgumentError, match=words):
        Corpus(write(tmp_path), share)


def test_a_text_that_changes_between_two_readings_is_an_error(tmp_path):
    path = save_texts(tmp_path / "a.txt", ["one", "two"])
    found = Corpus([path], 0.0)
    path.write_text(f"one\n{END}\ntwo and more")
    with pytest.raises(ArgumentError, match="(?s)changed during the build.*a.txt"):
        list(found.read())


BAD = [b"good", b"bad \xff", b"fine", b"half \xc3", b"end"]


@pytest.mark.parametrize("chunk", [1, 5, 2**20])
def test_documents_that_are_not_utf8_are_errors_or_skipped_and_counted(
    tmp_path, monkeypatch, chunk
):
    monkeypatch.setattr(corpus, "CHUNK_BYTES", chunk)
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n<|endoftext|>\n".join(BAD))
    with pytest.raises(ArgumentError, match="(?s)not UTF-8.*line 3: byte 0xff at 23.*--invalid"):
        Corpus([path], 0.0)
    found = Corpus([path], 0.0, invalid="skip")
    assert texts_of(found) == ["good", "fine", "end"]
    (skipped,) = found.skipped
    assert (skipped.name, skipped.documents) == ("a.txt", 2)
    assert "line 3: byte 0xff" in skipped.first
    assert found.documents["train"] == found.files[0].documents == 3
    path.write_bytes(b"\n<|endoftext|>\n".join(BAD[2:]))
    with pytest.raises(ArgumentError, match="(?s)not UTF-8.*line 3: byte 0xc3 at 24"):
        Corpus([path], 0.0)


def test_invalid_lines_are_errors_or_skipped_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_LINE_BYTES", 60)
    monkeypatch.setattr(corpus, "CHUNK_BYTES", 16)
    bad = {
        b'{"text": "\xff"}': "byte 0xff at 27",
        b'{"text": 3}': "not a document",
        b"[": "not a document",
        b'["text"]': "not a document",
        b'{"text": "bad \\ud83d"}': r"lone surrogate.*U\+D83D",
        b'{"text": "%s"}' % (b"x" * 99): "too long",
    }
    good = [b'{"text": "good"}', b"", b'{"text": " "}', b'{"text": "end"}']
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([good[0], *bad, *good[1:]]))
    found = Corpus([path], 0.0, invalid="skip")
    assert texts_of(found) == ["good", "end"]
    assert found.skipped[0].documents == len(bad)
    for line, words in bad.items():
        path.write_bytes(good[0] + b"\n" + line)
        with pytest.raises(ArgumentError, match=r"(?s)a\.jsonl, line 2.*--invalid skip") as raised:
            Corpus([path], 0.0)
        raised.match(f"(?s){words}")
