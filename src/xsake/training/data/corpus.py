"""The texts that data is built from: read as streams, split by document, cut where too long."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

from xsake.errors import ArgumentError, escape_controls
from xsake.evaluation.documents import list_files
from xsake.evaluation.record import TextFile
from xsake.training.data.index import Skipped, Split
from xsake.training.data.texts import Fault, Part, TextReader

LONGEST_PIECE = 2**21  # characters; a tokenizer takes some hundred bytes for each
TRAINING_PIECE = 2**16  # characters; training takes several hundred of them at once

Invalid = Literal["refuse", "skip"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is tokenised at once: a document, or a part of a long one."""

    text: str
    split: Split
    is_last: bool  # of its document


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts that were read once from end to end, and can be read again.

    Args:
        paths: of the files, in order.
        files: what they were.
        documents: of each split.
        pieces: of all documents.
        validation: share of documents that go there.
        skipped: documents that cannot be used, by file.
        long: the split of each document of more than a piece, by its file and its number there;
            None: not used.
    """

    paths: tuple[Path, ...]
    files: tuple[TextFile, ...]
    documents: dict[Split, int]
    pieces: int
    validation: float
    skipped: tuple[Skipped, ...]
    long: dict[tuple[int, int], Split | None]

    @classmethod
    def survey(
        cls,
        paths: Sequence[Path],
        validation: float,
        watch: Callable[[str], None] | None = None,
        *,
        invalid: Invalid = "refuse",
    ) -> "Corpus":
        """Read all texts, so that what is wrong with one is said before hours are spent.

        Args:
            paths: as `read_texts` takes them.
            validation: share of documents that are kept for validation.
            watch: gets the name of every file that is about to be read.
            invalid: documents that cannot be used end the build, or are left out and counted.
        """
        places = tuple(_each_once(list_files(paths)))
        survey = _Survey(validation, invalid)
        for number, path in enumerate(places):
            if watch is not None:
                watch(path.name)
            survey.read(number, path)
        _require_each_once(survey.files)
        _require_documents(survey, paths)
        return cls(
            places, tuple(survey.files), survey.documents, survey.pieces, validation,
            tuple(survey.skipped), survey.long,
        )  # fmt: skip

    def read(self) -> Iterator[Piece]:
        """Every piece of every document, in order."""
        for split, parts in self._documents():
            pieces = pieces_of(parts, LONGEST_PIECE)
            before = next(pieces)
            for piece in pieces:
                yield Piece(before, split, is_last=False)
                before = piece
            yield Piece(before, split, is_last=True)

    def training_texts(self) -> Iterator[str]:
        """The documents of the train split, in small pieces."""
        for split, parts in self._documents():
            if split == "train":
                yield from pieces_of(parts, TRAINING_PIECE)

    def _documents(self) -> Iterator[tuple[Split, Iterator[str]]]:
        """The documents that are used, each with the parts of its text."""
        for number, (path, before) in enumerate(zip(self.paths, self.files, strict=True)):
            reader, documents = TextReader(path), 0
            for place, document in enumerate(reader.documents()):
                head = _head(document)
                if head[-1].is_last:
                    split = _assess(head, self.validation).split
                else:
                    split = self.long.get((number, place))
                if split is not None:
                    documents += 1
                    yield split, (part.text for part in chain(head, document))
            if reader.identity(documents) != before:
                raise ChangedTextError(
                    "a text was changed while data was built from it",
                    got=before.name,
                    fix="give the command again with --fresh when nothing writes to the texts",
                )


class ChangedTextError(ArgumentError):
    """A text that is not what it was in the survey; what was made from it cannot be kept."""


@dataclasses.dataclass(frozen=True)
class _Assessment:
    """A document that was read to its end; without a split it is not used."""

    split: Split | None
    pieces: int
    characters: int
    fault: Fault | None


class _Survey:
    """Counts of the texts that were read so far."""

    def __init__(self, validation: float, invalid: Invalid):
        self._validation, self._invalid = validation, invalid
        self.files: list[TextFile] = []
        self.documents: dict[Split, int] = {"train": 0, "validation": 0}
        self.pieces = 0
        self.skipped: list[Skipped] = []
        self.long: dict[tuple[int, int], Split | None] = {}

    def read(self, number: int, path: Path) -> None:
        """Read a file from start to end."""
        reader, used, faults, first = TextReader(path), 0, 0, None
        for place, document in enumerate(reader.documents()):
            found = _assess(document, self._validation)
            if found.fault is not None:
                if self._invalid == "refuse":
                    raise found.fault.error(path)
                faults, first = faults + 1, first or found.fault
            if found.characters > LONGEST_PIECE:
                self.long[number, place] = found.split
            if found.split is not None:
                self.documents[found.split] += 1
                self.pieces += found.pieces
                used += 1
        self.files.append(reader.identity(used))
        if first is not None:
            why = escape_controls(f"{first.what}: {first.place(path)}")[:300]
            self.skipped.append(Skipped(name=path.name, documents=faults, first=why))


def _assess(parts: Iterable[Part], validation: float) -> _Assessment:
    """Read a document to its end."""
    digest, fault, characters, is_blank = _new_digest(), None, 0, True

    def texts() -> Iterator[str]:
        nonlocal fault, characters, is_blank
        for part in parts:
            fault = fault or part.fault
            characters += len(part.text)
            is_blank = is_blank and not part.text.strip()
            digest.update(part.text.encode())
            yield part.text

    pieces = sum(1 for _ in pieces_of(texts(), LONGEST_PIECE))
    split = None if is_blank or fault is not None else _side(digest.digest(), validation)
    return _Assessment(split, pieces, characters, fault)


def _head(document: Iterator[Part]) -> list[Part]:
    """The first parts of a document, all of them unless it has more than a piece."""
    head, characters = [], 0
    for part in document:
        head.append(part)
        characters += len(part.text)
        if characters > LONGEST_PIECE:
            break
    return head


def split_of(text: str, validation: float) -> Split:
    """Where a document belongs: the same for the same text, wherever it lies.

    Args:
        text: of the whole document.
        validation: share of documents that are kept for validation.

    Example:
        >>> split_of("a text", 0.0), split_of("a text", 1.0)
        ('train', 'validation')
    """
    digest = _new_digest()
    digest.update(text.encode())
    return _side(digest.digest(), validation)


def _new_digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=8)


def _side(digest: bytes, validation: float) -> Split:
    return "validation" if int.from_bytes(digest, "big") < validation * 2**64 else "train"


def pieces_of(parts: Iterable[str], longest: int) -> Iterator[str]:
    """A text in pieces that a tokenizer can take, cut behind lines or before words.

    Tokens at a cut may be others than in the whole text; they spell the same text.

    Args:
        parts: of the text, wherever they were cut.
        longest: characters of a piece.

    Example:
        >>> list(pieces_of(["one tw", "o three"], longest=8))
        ['one two', ' three']
    """
    text, start = "", 0
    for part in parts:
        text, start = text[start:] + part, 0
        while len(text) - start > longest:
            end = _cut(text, start, start + longest)
            yield text[start:end]
            start = end
    yield text[start:]


def _cut(text: str, start: int, limit: int) -> int:
    """The best place for a cut: behind a single newline, else before a space, else the limit."""
    for space, behind in (("\n", 1), (" ", 0)):
        place = text.rfind(space, start + 1, limit)
        while place > 0:
            if not text[place - 1].isspace() and not text[place + 1].isspace():
                return place + behind
            place = text.rfind(space, start + 1, place)
    return limit


def _each_once(files: Iterable[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for file in files:
        if (resolved := file.resolve()) in seen:
            raise ArgumentError("a text is given twice", got=file, fix="name each file once")
        seen.add(resolved)
        yield file


def _require_documents(survey: _Survey, paths: Sequence[Path]) -> None:
    if not any(survey.documents.values()):
        raise ArgumentError(
            "there is no text to build data from",
            got=", ".join(str(path) for path in paths),
            expected="at least one document that is not blank",
        )
    if not survey.documents["train"]:
        raise ArgumentError(
            "no document is left for training",
            got=f"{survey.documents['validation']} documents, all of them for validation",
            fix="give more texts, or a smaller share with --validation",
        )


def _require_each_once(files: Sequence[TextFile]) -> None:
    seen: set[tuple[str, str]] = set()
    for file in files:
        if file.documents and (file.name, file.sha256) in seen:
            raise ArgumentError(
                "two files have the same name and the same text",
                got=file.name,
                expected="every text once",
                fix="leave one of them out",
            )
        seen.add((file.name, file.sha256))
