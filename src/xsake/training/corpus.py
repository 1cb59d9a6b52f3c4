"""Texts of a build: files of any size, streamed as documents, assigned to splits, cut in pieces.

The documents are those of `xsake.evaluation.read_texts`, which holds whole files in memory.
"""

import codecs
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from xsake.errors import ArgumentError, escape_controls
from xsake.evaluation.documents import list_files
from xsake.evaluation.record import TextFile
from xsake.training.data import SkippedDocuments, Split

CHUNK_BYTES = 2**20
MAX_LINE_BYTES = 2**28  # of a .jsonl file, which is parsed line by line
MAX_SEPARATOR_BYTES = 2**12  # including blanks after a separator
MAX_PIECE_CHARS = 2**21  # a tokenizer needs some hundred bytes for each
TOKENIZER_PIECE_CHARS = 2**16  # tokenizer training holds several hundred pieces in memory

OnInvalid = Literal["refuse", "skip"]

_SEPARATOR = re.compile(rb"\n<\|endoftext\|>[ \t]*\r?(?=\n|\Z)")
_SKIP = ", or skip such documents with --invalid skip"


class ChangedTextError(ArgumentError):
    """A text file that changed after the survey."""


class Part(NamedTuple):
    """Part of a document's text, in order; a fault makes the whole document unusable."""

    document: int  # in its file
    text: str
    fault: ArgumentError | None = None


class Piece(NamedTuple):
    """Unit of tokenization: a document, or a part of a long one."""

    text: str
    split: Split
    is_last: bool  # of its document


class TextReader:
    """Reader of one .txt, .raw or .jsonl file from start to end, once."""

    def __init__(self, path: Path):
        self._path, self._digest, self._num_bytes = path, hashlib.sha256(), 0

    def documents(self) -> Iterator[tuple[int, Iterator[Part]]]:
        """Yield number and parts of each document, with blank ones; unread parts are skipped."""
        return itertools.groupby(self._parts(), key=lambda part: part.document)

    def identity(self, documents: int) -> TextFile:
        """Return size and digest of the file, after its last document was read."""
        name, sha256 = self._path.name, self._digest.hexdigest()
        return TextFile(name=name, bytes=self._num_bytes, sha256=sha256, documents=documents)

    def _parts(self) -> Iterator[Part]:
        read = self._read_jsonl if self._path.suffix == ".jsonl" else self._read_plain
        try:
            with self._path.open("rb") as file:
                if self._take(file.read(len(codecs.BOM_UTF8))) != codecs.BOM_UTF8:
                    file.seek(0)
                    self._digest, self._num_bytes = hashlib.sha256(), 0
                yield from read(file)
        except OSError as error:
            raise ArgumentError(
                "text-unreadable", "cannot read a text file", got=f"{self._path}: {error}"
            ) from error

    def _read_plain(self, file: BinaryIO) -> Iterator[Part]:
        """Decode blocks of whole lines; the newlines around a separator are in no document.

        A block starts with the newline before it, held back from the previous block, so every
        document starts with a newline to remove. A very long line spans several blocks.
        """
        decoder = codecs.getincrementaldecoder("utf-8")()
        document, line, held, is_start, is_valid = 0, 0, b"\n", True, True
        while True:
            block = self._take(file.read(CHUNK_BYTES) + file.readline(MAX_SEPARATOR_BYTES))
            data, held = held + block, b"\n" if block.endswith(b"\n") else b""
            data, begin = data[: len(data) - len(held)], 0
            for end, following in [*(m.span() for m in _SEPARATOR.finditer(data)), (len(data), -1)]:
                if is_start and begin < end:
                    begin, is_start = begin + data.startswith(b"\n", begin), False
                is_last, text, fault = following >= 0 or not block, "", None
                try:
                    text = decoder.decode(data[begin:end], is_last) if is_valid else ""
                except UnicodeDecodeError as error:
                    wrong, is_valid = end - len(error.object) + error.start, False
                    offset = self._num_bytes - len(held) - len(data) + wrong
                    number = line + data.count(b"\n", 0, max(wrong, 0))
                    fault = self._not_utf8(number, error, offset)
                yield Part(document, text, fault)
                if is_last:
                    decoder.reset()
                    document, begin, is_start, is_valid = document + 1, following, True, True
            line += data.count(b"\n")
            if not block:
                return

    def _read_jsonl(self, file: BinaryIO) -> Iterator[Part]:
        number = 0
        while line := self._take(file.readline(MAX_LINE_BYTES + 1)):
            number += 1
            if len(line) <= MAX_LINE_BYTES:
                yield self._parse_line(number, line)
                continue
            while line and not line.endswith(b"\n"):
                line = self._take(file.readline(CHUNK_BYTES))
            got = f"more than {MAX_LINE_BYTES:,} bytes"
            fix = "put the document into a .txt file, which has no limit"
            fault = self._fault(
                "line-length", "a line is too long", number, got, "a document per line", fix
            )
            yield Part(number, "", fault)

    def _parse_line(self, number: int, line: bytes) -> Part:
        try:
            text = line.decode()
            text = json.loads(text)["text"] if text.strip() else ""
            text.encode()
            return Part(number, text)
        except UnicodeDecodeError as error:
            fault = self._not_utf8(number, error, self._num_bytes - len(line) + error.start)
        except UnicodeEncodeError as error:
            got = f"U+{ord(error.object[error.start]):04X} alone"
            fix, expected = "correct the escapes in the line", "text that can be encoded as UTF-8"
            what = "a document has a lone surrogate"
            fault = self._fault("surrogate", what, number, got, expected, fix)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            got, expected = line[:60].decode(errors="replace"), 'a JSON object with a "text"'
            fault = self._fault(
                "line", "a line is not a document", number, got, expected, "correct the line"
            )
        return Part(number, "", fault)

    def _not_utf8(self, line: int, error: UnicodeDecodeError, offset: int) -> ArgumentError:
        got, fix = f"byte {error.object[error.start]:#04x} at {offset}", "convert it, as with iconv"
        return self._fault("text-utf8", "a text file is not UTF-8", line, got, "UTF-8", fix)

    def _fault(
        self, slug: str, what: str, line: int, got: str, expected: str, fix: str
    ) -> ArgumentError:
        got = f"{self._path.name}, line {line}: {got}"
        return ArgumentError(slug, what, got=got, expected=expected, fix=fix + _SKIP)

    def _take(self, data: bytes) -> bytes:
        self._digest.update(data)
        self._num_bytes += len(data)
        return data


class Corpus:
    """Texts that were read completely once, so that errors come first, and can be read again.

    `validation` is the share of documents in that split; `on_file` is called with the name of every
    file before it is read.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        validation: float,
        on_file: Callable[[str], None] = lambda name: None,
        *,
        invalid: OnInvalid = "refuse",
    ):
        self._paths, self._validation, self._invalid = [*list_files(paths)], validation, invalid
        self.files: list[TextFile] = []
        self.documents: dict[Split, int] = {"train": 0, "validation": 0}
        self.pieces = 0  # of all documents
        self.skipped: list[SkippedDocuments] = []  # by file
        self._long: dict[tuple[Path, int], Split | None] = {}  # splits of documents above a piece
        resolved = [path.resolve() for path in self._paths]
        if len(set(resolved)) < len(resolved):
            twice = next(path for path in resolved if resolved.count(path) > 1)
            raise ArgumentError(
                "file-twice", "a text file is given twice", got=twice, fix="name each file once"
            )
        seen: set[tuple[str, str]] = set()
        for path in self._paths:
            on_file(path.name)
            file = self._survey(path)
            if file.documents and (file.name, file.sha256) in seen:
                what = "two files have the same name and the same text"
                raise ArgumentError("same-text", what, got=file.name, fix="remove one of them")
            seen.add((file.name, file.sha256))
            self.files.append(file)
        if not any(self.documents.values()):
            got, expected = ", ".join(map(str, paths)), "at least one document that is not blank"
            raise ArgumentError(
                "no-documents", "the texts have no documents", got=got, expected=expected
            )
        if not self.documents["train"]:
            got = f"{self.documents['validation']} documents, all of them for validation"
            fix = "add texts, or use a smaller share with --validation"
            raise ArgumentError("no-train-documents", "the train split is empty", got=got, fix=fix)

    def read(self) -> Iterator[Piece]:
        """Yield every piece of every document, in order."""
        for split, texts in self._documents():
            pieces = split_pieces(texts, MAX_PIECE_CHARS)
            previous = next(pieces)
            for piece in pieces:
                yield Piece(previous, split, is_last=False)
                previous = piece
            yield Piece(previous, split, is_last=True)

    def training_texts(self) -> Iterator[str]:
        """Yield the documents of the train split in small pieces."""
        for split, texts in self._documents():
            if split == "train":
                yield from split_pieces(texts, TOKENIZER_PIECE_CHARS)

    def _survey(self, path: Path) -> TextFile:
        """Count the documents of a file."""
        reader, num_used, num_faults, first = TextReader(path), 0, 0, ""
        for number, parts in reader.documents():
            parts = _Tee(parts)
            num_pieces = sum(1 for _ in split_pieces(parts, MAX_PIECE_CHARS))
            split = parts.split(self._validation)
            if parts.fault is not None and self._invalid == "refuse":
                raise parts.fault
            if parts.fault is not None:
                num_faults += 1
                first = first or f"{parts.fault.what}: {parts.fault.got}"
            if parts.num_chars > MAX_PIECE_CHARS:
                self._long[path, number] = split
            if split is not None:
                self.documents[split] += 1
                self.pieces += num_pieces
                num_used += 1
        if num_faults:
            first = escape_controls(first)[:300]
            skipped = SkippedDocuments(name=path.name, documents=num_faults, first=first)
            self.skipped.append(skipped)
        return reader.identity(num_used)

    def _documents(self) -> Iterator[tuple[Split, Iterator[str]]]:
        """Yield the used documents, each with the parts of its text."""
        for path, expected in zip(self._paths, self.files, strict=True):
            reader, num_used = TextReader(path), 0
            for number, parts in reader.documents():
                parts = _Tee(parts)
                head = parts.read(MAX_PIECE_CHARS)
                is_long = parts.num_chars > MAX_PIECE_CHARS
                split = self._long.get((path, number)) if is_long else parts.split(self._validation)
                if split is not None:
                    num_used += 1
                    yield split, itertools.chain(head, parts)
            if reader.identity(num_used) != expected:
                fix = "repeat the command with --no-resume when the texts no longer change"
                what = "a text file changed during the build"
                raise ChangedTextError("changed-text", what, got=expected.name, fix=fix)


class _Tee:
    """Iterator of a document's texts that also counts and hashes them."""

    def __init__(self, parts: Iterable[Part]):
        self._parts, self._digest = iter(parts), hashlib.blake2b(digest_size=8)
        self.fault: ArgumentError | None = None
        self.num_chars, self._is_blank = 0, True

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        part = next(self._parts)
        self.fault = self.fault or part.fault
        self.num_chars += len(part.text)
        self._is_blank = self._is_blank and not part.text.strip()
        self._digest.update(part.text.encode())
        return part.text

    def read(self, max_chars: int) -> list[str]:
        """Return texts up to the first one that exceeds a number of characters."""
        texts = []
        while self.num_chars <= max_chars and (text := next(self, None)) is not None:
            texts.append(text)
        return texts

    def split(self, validation: float) -> Split | None:
        """Return the split of a document that was read completely; None: it is not used."""
        if self._is_blank or self.fault is not None:
            return None
        return assign_split(self._digest.digest(), validation)


def assign_split(digest: bytes, validation: float) -> Split:
    """Return the split of a document by its digest, for a share of documents in validation.

    Example:
        >>> assign_split(bytes(8), 0.0), assign_split(bytes(8), 0.1)
        ('train', 'validation')
    """
    return "validation" if int.from_bytes(digest, "big") < validation * 2**64 else "train"


def split_pieces(parts: Iterable[str], max_chars: int) -> Iterator[str]:
    """Yield a text in pieces for a tokenizer, cut after newlines or before spaces.

    Tokens at a cut may differ from those of the whole text; they decode to the same text.

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
