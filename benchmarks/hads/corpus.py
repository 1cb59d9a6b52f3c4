"""The documents of the HADS measurements: 12 for calibration, 24 for tests, 12 fresh; four kinds.

Fresh documents took no part in any choice of method or setting: they were drawn after all of it.

`code_documents` has 32 longer ones for models of source code, from CPython's standard library:
12 for calibration, 12 for tests, 8 fresh. Modules of both lists are in the same split.
"""

import dataclasses
import hashlib
import importlib.util
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xsake.evaluation.documents import SEPARATOR
from xsake.model.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parents[3] / "shared" / "data"
LONGEST = 8192  # tokens that every document has; a fresh one may end after FRESH_TOKENS
FRESH_TOKENS = 4096
KINDS = ("book", "wikipedia", "web", "code")
COUNTS = {"calibration": 3, "test": 6, "fresh": 3}  # documents of each kind
LONGEST_CODE = 16_384  # tokens of every document of `code_documents`
CODE = Path(__file__).with_name("code_documents.json")
FRESH_START = 300_000  # characters into a test book: past the part that the test split reads

BOOKS = {
    "calibration": ("Doyle_Hound_1902", "Burnett_Garden_1911", "Ford_Post_1926"),
    "test": (
        "Woolf_Night_1919",
        "Lawrence_Serpent_1926",
        "Galsworthy_Man_1906",
        "Gissing_Warburton_1903",
    ),
}
MODULES = {
    "calibration": ("typing", "argparse", "numpy.lib._function_base_impl"),
    "test": ("inspect", "doctest", "tarfile", "subprocess", "jax._src.core", "pydantic.main"),
    "fresh": ("logging", "zipfile", "unittest.mock"),
}


@dataclasses.dataclass(frozen=True)
class Document:
    """The first tokens of a text; those of source code have a domain."""

    kind: str
    split: str
    name: str
    tokens: np.ndarray
    domain: str = ""


def documents(tokenizer: Tokenizer, texts: Path = TEXTS) -> list[Document]:
    """Return all documents, kinds interleaved, so that the first few are of every kind."""
    taken: dict[tuple[str, str], list[Document]] = {
        (split, kind): [] for split in COUNTS for kind in KINDS
    }
    for kind, split, name, text in _candidates(texts):
        if all(len(taken[x, kind]) == COUNTS[x] for x in (split, "fresh")):
            continue
        tokens = np.asarray(tokenizer.encode(text[: 12 * LONGEST]), np.int32)[:LONGEST]
        if split == "test" and (len(taken[split, kind]) == COUNTS[split] or len(tokens) < LONGEST):
            split = "fresh"
        is_long = len(tokens) >= (FRESH_TOKENS if split == "fresh" else LONGEST)
        if is_long and len(taken[split, kind]) < COUNTS[split]:
            taken[split, kind].append(Document(kind, split, name, tokens))
    for (split, kind), chosen in taken.items():
        assert len(chosen) == COUNTS[split], f"only {len(chosen)} documents of {kind} for {split}"
    return [
        taken[split, kind][place]
        for split, count in COUNTS.items()
        for place in range(count)
        for kind in KINDS
    ]


def code_documents(tokenizer: Tokenizer) -> list[Document]:
    """Return the long documents of source code, domains interleaved in each split."""
    made = []
    for split, domain, name, text in code_texts():
        tokens = np.asarray(tokenizer.encode(text), np.int32)[:LONGEST_CODE]
        assert len(tokens) == LONGEST_CODE, f"{name} has only {len(tokens)} tokens"
        made.append(Document("code", split, name, tokens, domain))
    return made


def code_texts() -> Iterator[tuple[str, str, str, str]]:
    """Yield (split, domain, name, text) of the listed files of the standard library."""
    listed, library = json.loads(CODE.read_text()), Path(sysconfig.get_path("stdlib"))
    for entry in listed["documents"]:
        text = "".join((library / file).read_text(encoding="utf-8") for file in entry["files"])
        name, digest = " + ".join(entry["files"]), hashlib.sha256(text.encode()).hexdigest()
        if digest != entry["sha256"]:
            raise SystemExit(
                f"Other text of {name}: got sha256 {digest} in Python {platform.python_version()}, "
                f"expected {entry['sha256']}. Run this with Python {listed['python']}."
            )
        yield entry["split"], entry["domain"], name, text


def _candidates(texts: Path) -> Iterator[tuple[str, str, str, str]]:
    """(kind, split, name, text), in the order in which they are taken."""
    for split, names in BOOKS.items():
        for name in names:
            yield "book", split, name, (texts / "books" / f"{name}.txt").read_text()
    for name in BOOKS["test"][:2]:
        text = (texts / "books" / f"{name}.txt").read_text()
        yield "book", "test", f"{name}, second half", text[len(text) // 2 :]
    for name in BOOKS["test"][1:]:
        text = (texts / "books" / f"{name}.txt").read_text()
        yield "book", "fresh", f"{name}, from character {FRESH_START}", text[FRESH_START:]
    for title, text in _articles(texts / "wikipedia_en_train.txt"):
        yield "wikipedia", "calibration", title, text
    with (texts / "wikipedia_en_long_eval.jsonl").open() as lines:
        for line in lines:
            article = json.loads(line)
            yield "wikipedia", "test", article["title"], article["text"]
    pages = [*_articles(texts / "openwebtext_train_1000docs.txt")]
    long = [(title, text) for title, text in pages if len(text) > 30_000]
    for place, (title, text) in enumerate(long):
        yield "web", "calibration" if place % 2 else "test", title, text
    for title, text in _articles(texts / "openwebtext_val_426docs.txt"):
        yield "web", "test", title, text
    for split, names in MODULES.items():
        for name in names:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            yield "code", split, name, Path(spec.origin).read_text()


def _articles(path: Path) -> Iterator[tuple[str, str]]:
    for text in SEPARATOR.split(path.read_text()):
        if text.strip():
            yield " ".join(text.split())[:40], text
