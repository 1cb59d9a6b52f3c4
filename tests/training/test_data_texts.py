"""A text file as a stream: the documents of `read_texts`, however large the file is."""

import hashlib
import json
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import pytest

from xsake import evaluation
from xsake.evaluation import read_texts
from xsake.training.data import texts
from xsake.training.data.texts import TextReader

PARTS = ["<|endoftext|>", "\n", "\r", " ", "\t", "<|end", "a", "é", "\ufeff", "𝔘", "\u2028"]


def streamed(path) -> list[str]:
    reader = TextReader(path)
    found = ["".join(part.text for part in document) for document in reader.documents()]
    assert reader.identity(0).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert reader.identity(0).bytes == path.stat().st_size
    return [text for text in found if text.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("texts")


@hypothesis.given(st.lists(st.sampled_from(PARTS), max_size=40), st.integers(1, 40))
@hypothesis.example(["a", "\n", "<|endoftext|>"], 1)
@hypothesis.example(["\ufeff", "<|endoftext|>", "\n", "<|endoftext|>", " ", "\r", "\n", "a"], 2)
def test_a_stream_has_the_documents_of_the_whole_file(folder, parts, chunk):
    path = folder / "a.txt"
    path.write_text("".join(parts) + "\n<|endoftext|>\nlast")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "CHUNK_BYTES", chunk)
        assert streamed(path) == [document.text for document in read_texts([path]).documents]


@hypothesis.given(st.lists(st.text(max_size=9), min_size=1), st.booleans(), st.booleans())
def test_lines_of_json_are_those_of_the_whole_file(folder, words, is_marked, is_ascii):
    path = folder / "a.jsonl"
    lines = [json.dumps({"text": word}, ensure_ascii=is_ascii) for word in [*words, "last"]]
    path.write_text("\n".join(lines), encoding="utf-8-sig" if is_marked else "utf-8")
    assert streamed(path) == [document.text for document in read_texts([path]).documents]


def test_parts_have_a_bounded_length(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK_BYTES", 100)
    (tmp_path / "a.txt").write_text("x" * 10_000)
    documents = [list(document) for document in TextReader(tmp_path / "a.txt").documents()]
    assert len(documents) == 1 and max(len(part.text) for part in documents[0]) <= 103


def test_what_is_larger_than_an_evaluation_takes_can_be_streamed(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation.documents, "MAX_BYTES", 1000)
    (tmp_path / "a.txt").write_text("word " * 1000)
    assert streamed(tmp_path / "a.txt") == ["word " * 1000]


READ = """
import resource, sys
from pathlib import Path
from xsake.training.data.corpus import Corpus

start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus = Corpus.survey([Path(sys.argv[1])], 0.0)
print(sum(len(piece.text) for piece in corpus.read()))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) // 1024)
"""


@pytest.mark.slow
def test_a_file_above_a_gibibyte_is_read_in_bounded_memory(tmp_path):
    path = tmp_path / "large.txt"
    with path.open("wb") as file:
        file.truncate(2**30 + 12345)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, check=True
    )
    characters, megabytes = map(int, done.stdout.split())
    assert characters == 2**30 + 12345 and megabytes < 100
