"""The texts that data is built from: read in portions, split by document, cut where too long."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.evaluation.documents import Document, Texts, read_texts
from xsake.evaluation.record import TextFile
from xsake.training.data.index import Split

PORTION_BYTES = 2**28  # of files that are in memory at once, unless a single file is larger
LONGEST_PIECE = 2**21  # characters; a tokenizer takes some hundred bytes for each


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
        portions: files in order, a few at a time.
        files: what they were.
        documents: of each split.
        pieces: of all documents.
        validation: share of documents that go there.
    """

    portions: tuple[tuple[Path, ...], ...]
    files: tuple[TextFile, ...]
    documents: dict[Split, int]
    pieces: int
    validation: float

    @classmethod
    def survey(
        cls, paths: Sequence[Path], validation: float, watch: Callable[[str], None] | None = None
    ) -> "Corpus":
        """Read all texts, so that what is wrong with one is said before hours are spent.

        Args:
            paths: as `read_texts` takes them.
            validation: share of documents that are kept for validation.
            watch: is told the name of every file that is about to be read.
        """
        portions = tuple(_portions(_files(paths)))
        files: list[TextFile] = []
        documents: dict[Split, int] = {"train": 0, "validation": 0}
        pieces = 0
        for portion in portions:
            if watch is not None:
                watch(portion[0].name)
            texts = read_texts(portion)
            files += texts.files
            for document in texts.documents:
                _require_whole_characters(document)
                documents[split_of(document.text, validation)] += 1
                pieces += sum(1 for _ in pieces_of(document.text, LONGEST_PIECE))
        _require_each_once(files)
        if not documents["train"]:
            raise ArgumentError(
                "no document is left for training",
                got=f"{documents['validation']} documents, all of them for validation",
                fix="give more texts, or a smaller share with --validation",
            )
        return cls(portions, tuple(files), documents, pieces, validation)

    def read(self) -> Iterator[Piece]:
        """Every piece of every document, in order."""
        for document in self._again():
            split = split_of(document.text, self.validation)
            *before, last = pieces_of(document.text, LONGEST_PIECE)
            for part in before:
                yield Piece(part, split, is_last=False)
            yield Piece(last, split, is_last=True)

    def training_texts(self) -> Iterator[str]:
        """The documents of the train split."""
        for document in self._again():
            if split_of(document.text, self.validation) == "train":
                yield document.text

    def _again(self) -> Iterator[Document]:
        known = iter(self.files)
        for portion in self.portions:
            texts = read_texts(portion)
            _require_unchanged(texts, [next(known) for _ in texts.files])
            yield from texts.documents


def split_of(text: str, validation: float) -> Split:
    """Where a document belongs: the same for the same text, wherever it lies.

    Args:
        text: of the whole document.
        validation: share of documents that are kept for validation.

    Example:
        >>> split_of("a text", 0.0), split_of("a text", 1.0)
        ('train', 'validation')
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return "validation" if int.from_bytes(digest, "big") < validation * 2**64 else "train"


def pieces_of(text: str, longest: int) -> Iterator[str]:
    """A text in pieces that a tokenizer can take, cut behind lines or before words.

    Tokens at a cut may be others than in the whole text; they spell the same text.

    Args:
        text: of any length.
        longest: characters of a piece.

    Example:
        >>> list(pieces_of("one two three", longest=8))
        ['one two', ' three']
    """
    start = 0
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


def _files(paths: Sequence[Path]) -> list[Path]:
    files = [
        file
        for path in paths
        # What is no folder, and an empty one, is left to `read_texts`, which says what is wrong.
        for file in (path.is_dir() and sorted(path.glob("*.txt"))) or [path]
    ]
    seen: set[Path] = set()
    for file in files:
        if (resolved := file.resolve()) in seen:
            raise ArgumentError("a text is given twice", got=file, fix="name each file once")
        seen.add(resolved)
    return files


def _portions(files: Sequence[Path]) -> Iterator[tuple[Path, ...]]:
    portion: list[Path] = []
    size = 0
    for file in files:
        length = file.stat().st_size if file.is_file() else 0
        if portion and size + length > PORTION_BYTES:
            yield tuple(portion)
            portion, size = [], 0
        portion.append(file)
        size += length
    if portion:
        yield tuple(portion)


def _require_whole_characters(document: Document) -> None:
    try:
        document.text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(
            "a document holds half a character",
            got=f"{document.name}: U+{ord(document.text[error.start]):04X} alone",
            expected="text that can be written as UTF-8",
            fix="correct the escapes in its .jsonl file",
        ) from error


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


def _require_unchanged(texts: Texts, known: Sequence[TextFile]) -> None:
    for now, before in zip(texts.files, known, strict=True):
        if now != before:
            raise ArgumentError(
                "a text was changed while data was built from it",
                got=now.name,
                fix="give the command again with --fresh when nobody writes to the texts",
            )
