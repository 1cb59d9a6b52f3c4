"""Documents of source code: pinned texts, and splits that agree with the shorter documents."""

import hashlib
import json

import pytest

from benchmarks.hads import corpus
from benchmarks.hads.corpus import CODE, LONGEST_CODE, MODULES, code_documents

LISTED = json.loads(CODE.read_text())["documents"]


class Characters:
    """A tokenizer with one token per character."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of two files, and the list of one document."""
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(f"# {name}\n" * LONGEST_CODE)
    text = "".join((tmp_path / name).read_text() for name in ("b.py", "a.py"))
    digest = hashlib.sha256(text.encode()).hexdigest()
    entry = {"split": "test", "domain": "files", "files": ["b.py", "a.py"], "sha256": digest}
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps({"python": "3.0.1", "documents": [entry]}))
    monkeypatch.setattr(corpus, "CODE", listed)
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda _: tmp_path)
    return tmp_path


def test_a_document_is_the_start_of_its_files(library):
    (document,) = code_documents(Characters())
    assert (document.kind, document.split, document.domain) == ("code", "test", "files")
    assert document.name == "b.py + a.py" and len(document.tokens) == LONGEST_CODE
    assert document.tokens[:6].tolist() == list(b"# b.py")


def test_another_text_is_refused_with_the_version_that_has_it(library):
    (library / "a.py").write_text("pass\n")
    with pytest.raises(SystemExit, match=r"b\.py \+ a\.py.*Python 3\.0\.1"):
        code_documents(Characters())


def test_splits_have_every_domain_no_file_twice_and_modules_where_they_were():
    counts = {}
    for entry in LISTED:
        key = entry["split"], entry["domain"]
        counts[key] = counts.get(key, 0) + 1
    domains = {entry["domain"] for entry in LISTED}
    sizes = {"calibration": 3, "test": 3, "fresh": 2}
    assert counts == {(split, domain): sizes[split] for split in sizes for domain in domains}
    split_of = {file: entry["split"] for entry in LISTED for file in entry["files"]}
    assert len(split_of) == sum(len(entry["files"]) for entry in LISTED)
    for split, names in MODULES.items():
        for name in names:
            path = name.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                assert split_of.get(file, split) == split, file
