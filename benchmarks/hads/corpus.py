"""The documents of the HADS measurements: 12 to calibrate on, 24 others to test on, four kinds."""

import dataclasses
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from xsake.evaluation.documents import SEPARATOR
from xsake.model.tokenizer import Tokenizer

TEXTS = Path(__file__).resolve().parents[3] / "shared" / "data"
LONGEST = 8192  # tokens that every document has
KINDS = ("book", "wikipedia", "web", "code")
CALIBRATION, TEST = 3, 6  # documents of each kind

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
}


@dataclasses.dataclass(frozen=True)
class Document:
    """The first tokens of a text."""

    kind: str
    split: str
    name: str
    tokens: np.ndarray


def documents(tokenizer: Tokenizer, texts: Path = TEXTS) -> list[Document]:
    """All documents, kinds interleaved, so that the first few are of every kind."""
    found: dict[tuple[str, str], list[Document]] = {}
    for kind, split, name, text in _candidates(texts):
        most = CALIBRATION if split == "calibration" else TEST
        taken = found.setdefault((split, kind), [])
        if len(taken) == most or len(text) < 2 * LONGEST:
            continue
        tokens = np.asarray(tokenizer.encode(text[: 12 * LONGEST]), np.int32)[:LONGEST]
        if len(tokens) == LONGEST:
            taken.append(Document(kind, split, name, tokens))
    for (split, kind), taken in found.items():
        most = CALIBRATION if split == "calibration" else TEST
        assert len(taken) == most, f"only {len(taken)} documents of {kind} for {split}"
    return [
        found[split, kind][place]
        for split, most in (("calibration", CALIBRATION), ("test", TEST))
        for place in range(most)
        for kind in KINDS
    ]


def _candidates(texts: Path) -> Iterator[tuple[str, str, str, str]]:
    """(kind, split, name, text), in the order in which they are taken."""
    for split, names in BOOKS.items():
        for name in names:
            yield "book", split, name, (texts / "books" / f"{name}.txt").read_text()
    for name in BOOKS["test"][:2]:
        text = (texts / "books" / f"{name}.txt").read_text()
        yield "book", "test", f"{name}, second half", text[len(text) // 2 :]
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
