"""Texts of a build: streamed, assigned to splits by document, and cut into pieces."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

from xsake.errors import ArgumentError, escape_controls
from xsake.evaluation.documents import list_files
from xsake.evaluation.record import TextFile
from xsake.training.data.index import SkippedDocuments, Split
from xsake.training.data.texts import DocumentFault, TextPart, TextReader

MAX_PIECE_CHARS = 2**21  # a tokenizer needs some hundred bytes for each
TOKENIZER_PIECE_CHARS = 2**16  # tokenizer training holds several hundred pieces in memory

OnInvalid = Literal["refuse", "skip"]


@dataclasses.dataclass(frozen=True)
class Piece:
    """Unit of tokenization: a document, or a part of a long one."""

    text: str
    split: Split
    is_last: bool  # of its document


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Texts that were read completely once and can be read again.

    Args:
        paths: of the files, in order.
        files: sizes and digests.
        documents: number of documents by split.
        pieces: number of pieces of all documents.
        validation: share of documents in the validation split.
        skipped: unusable documents by file.
        long: split of each document longer than a piece, by file and index; None: not used.
    """

    paths: tuple[Path, ...]
    files: tuple[TextFile, ...]
    documents: dict[Split, int]
    pieces: int
    validation: float
    skipped: tuple[SkippedDocuments, ...]
    long: dict[tuple[int, int], Split | None]

    @classmethod
    def survey(
        cls,
        paths: Sequence[Path],
        validation: float,
        on_file: Callable[[str], None] | None = None,
        *,
        invalid: OnInvalid = "refuse",
    ) -> "Corpus":
        """Read all texts, so that errors are raised before the expensive part.

        Args:
            paths: as for `read_texts`.
            validation: share of documents in the validation split.
            on_file: called with the name of every file before it is read.
            invalid: raise for unusable documents, or skip and count them.
        """
        files = tuple(_reject_repeated_paths(list_files(paths)))
        survey = _Survey(validation, invalid)
        for number, path in enumerate(files):
            if on_file is not None:
                on_file(path.name)
            survey.read(number, path)
        _require_unique(survey.files)
        _require_documents(survey, paths)
        return cls(
            files, tuple(survey.files), survey.documents, survey.pieces, validation,
            tuple(survey.skipped), survey.long,
        )  # fmt: skip

    def read(self) -> Iterator[Piece]:
        """Yield every piece of every document, in order."""
        for split, parts in self._documents():
            pieces = split_pieces(parts, MAX_PIECE_CHARS)
            previous = next(pieces)
            for piece in pieces:
                yield Piece(previous, split, is_last=False)
                previous = piece
            yield Piece(previous, split, is_last=True)

    def training_texts(self) -> Iterator[str]:
        """Yield the documents of the train split in small pieces."""
        for split, parts in self._documents():
            if split == "train":
                yield from split_pieces(parts, TOKENIZER_PIECE_CHARS)

    def _documents(self) -> Iterator[tuple[Split, Iterator[str]]]:
        """Yield the used documents, each with the parts of its text."""
        for number, (path, expected) in enumerate(zip(self.paths, self.files, strict=True)):
            reader, documents = TextReader(path), 0
            for index, document in enumerate(reader.documents()):
                head = _read_head(document)
                if head[-1].is_last:
                    split = _assess(head, self.validation).split
                else:
                    split = self.long.get((number, index))
                if split is not None:
                    documents += 1
                    yield split, (part.text for part in chain(head, document))
            if reader.identity(documents) != expected:
                raise ChangedTextError(
                    "a text file changed during the build",
                    got=expected.name,
                    fix="repeat the command with --no-resume when the texts no longer change",
                )


class ChangedTextError(ArgumentError):
    """A text file that changed after the survey."""


@dataclasses.dataclass(frozen=True)
class _Assessment:
    """Counts of a document; without a split it is not used."""

    split: Split | None
    pieces: int
    characters: int
    fault: DocumentFault | None


class _Survey:
    """Counts of the texts read so far."""

    def __init__(self, validation: float, invalid: OnInvalid):
        self._validation, self._invalid = validation, invalid
        self.files: list[TextFile] = []
        self.documents: dict[Split, int] = {"train": 0, "validation": 0}
        self.pieces = 0
        self.skipped: list[SkippedDocuments] = []
        self.long: dict[tuple[int, int], Split | None] = {}

    def read(self, number: int, path: Path) -> None:
        """Read a file from start to end."""
        reader, num_used, num_faults, first = TextReader(path), 0, 0, None
        for index, document in enumerate(reader.documents()):
            assessment = _assess(document, self._validation)
            if assessment.fault is not None:
                if self._invalid == "refuse":
                    raise assessment.fault.error(path)
                num_faults, first = num_faults + 1, first or assessment.fault
            if assessment.characters > MAX_PIECE_CHARS:
                self.long[number, index] = assessment.split
            if assessment.split is not None:
                self.documents[assessment.split] += 1
                self.pieces += assessment.pieces
                num_used += 1
        self.files.append(reader.identity(num_used))
        if first is not None:
            why = escape_controls(f"{first.what}: {first.location(path)}")[:300]
            self.skipped.append(SkippedDocuments(name=path.name, documents=num_faults, first=why))


def _assess(parts: Iterable[TextPart], validation: float) -> _Assessment:
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

    pieces = sum(1 for _ in split_pieces(texts(), MAX_PIECE_CHARS))
    split = None if is_blank or fault is not None else _split_by_digest(digest.digest(), validation)
    return _Assessment(split, pieces, characters, fault)


def _read_head(document: Iterator[TextPart]) -> list[TextPart]:
    """Return the first parts of a document, at most a piece and one part."""
    head, characters = [], 0
    for part in document:
        head.append(part)
        characters += len(part.text)
        if characters > MAX_PIECE_CHARS:
            break
    return head


def assign_split(text: str, validation: float) -> Split:
    """Return the split of a document, which depends on its text only.

    Args:
        text: of the whole document.
        validation: share of documents in the validation split.

    Example:
        >>> assign_split("a text", 0.0), assign_split("a text", 1.0)
        ('train', 'validation')
    """
    digest = _new_digest()
    digest.update(text.encode())
    return _split_by_digest(digest.digest(), validation)


def _new_digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=8)


def _split_by_digest(digest: bytes, validation: float) -> Split:
    return "validation" if int.from_bytes(digest, "big") < validation * 2**64 else "train"


def split_pieces(parts: Iterable[str], max_chars: int) -> Iterator[str]:
    """Yield a text in pieces for a tokenizer, cut after newlines or before spaces.

    Tokens at a cut may differ from those of the whole text; they decode to the same text.

    Args:
        parts: of the text, cut anywhere.
        max_chars: of a piece.

    Example:
        >>> list(split_pieces(["one tw", "o three"], max_chars=8))
        ['one two', ' three']
    """
    text, start = "", 0
    for part in parts:
        text, start = text[start:] + part, 0
        while len(text) - start > max_chars:
            end = _find_cut(text, start, start + max_chars)
            yield text[start:end]
            start = end
    yield text[start:]


def _find_cut(text: str, start: int, limit: int) -> int:
    """Return the best cut: after a single newline, else before a space, else the limit."""
    for space, offset in (("\n", 1), (" ", 0)):
        index = text.rfind(space, start + 1, limit)
        while index > 0:
            if not text[index - 1].isspace() and not text[index + 1].isspace():
                return index + offset
            index = text.rfind(space, start + 1, index)
    return limit


def _reject_repeated_paths(files: Iterable[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for file in files:
        if (resolved := file.resolve()) in seen:
            raise ArgumentError("a text file is given twice", got=file, fix="name each file once")
        seen.add(resolved)
        yield file


def _require_documents(survey: _Survey, paths: Sequence[Path]) -> None:
    if not any(survey.documents.values()):
        raise ArgumentError(
            "the texts have no documents",
            got=", ".join(str(path) for path in paths),
            expected="at least one document that is not blank",
        )
    if not survey.documents["train"]:
        raise ArgumentError(
            "the train split is empty",
            got=f"{survey.documents['validation']} documents, all of them for validation",
            fix="add texts, or use a smaller share with --validation",
        )


def _require_unique(files: Sequence[TextFile]) -> None:
    seen: set[tuple[str, str]] = set()
    for file in files:
        if file.documents and (file.name, file.sha256) in seen:
            raise ArgumentError(
                "two files have the same name and the same text",
                got=file.name,
                expected="every text once",
                fix="remove one of them",
            )
        seen.add((file.name, file.sha256))
