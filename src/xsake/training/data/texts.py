"""Documents of one text file of any size, streamed in parts that fit into memory.

The documents are those of `xsake.evaluation.read_texts`, which reads whole files.
"""

import codecs
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from xsake.errors import ArgumentError
from xsake.evaluation.record import TextFile

CHUNK_BYTES = 2**20
MAX_LINE_BYTES = 2**28  # of a .jsonl file, which is parsed line by line
MAX_SEPARATOR_BYTES = 2**12  # including blanks after a separator

_SEPARATOR_LINE = rb"\n<\|endoftext\|>[ \t]*\r?"
_SEPARATOR = re.compile(_SEPARATOR_LINE + rb"(?=\n)")
_SEPARATOR_AT_END = re.compile(_SEPARATOR_LINE + rb"(?=\n|\Z)")
_END_OF_TEXT = b"<|endoftext|>"
_BLANKS = re.compile(rb"[ \t]*\r?")


@dataclasses.dataclass(frozen=True)
class DocumentFault:
    """Reason why a document is not usable.

    Args:
        what: the problem.
        offset: of the first wrong byte or of its line in the file.
        got: description of the wrong bytes.
        expected: valid content.
        fix: how to correct the file.
    """

    what: str
    offset: int
    got: str
    expected: str
    fix: str

    def location(self, path: Path) -> str:
        """Return file, line and wrong content; reads the file up to there."""
        return f"{path.name}, line {_line_at(path, self.offset)}: {self.got}"

    def error(self, path: Path) -> ArgumentError:
        """Return the error for the file."""
        fix = f"{self.fix}, or skip such documents with --invalid skip"
        return ArgumentError(self.what, got=self.location(path), expected=self.expected, fix=fix)


@dataclasses.dataclass(frozen=True)
class TextPart:
    """Part of a document's text, in order; a document with a fault has one part that names it."""

    text: str
    is_last: bool
    fault: DocumentFault | None = None


class TextReader:
    """Reader of one file from start to end, once.

    Args:
        path: a .txt, .raw or .jsonl file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def documents(self) -> Iterator[Iterator[TextPart]]:
        """Yield the parts of each document, including blank ones; unread parts are skipped."""
        parts = self._parts()
        for first in parts:
            document = _until_last(first, parts)
            yield document
            for _ in document:
                pass

    def identity(self, documents: int) -> TextFile:
        """Return size and digest of the file; call it after the last document.

        Args:
            documents: number of used documents.
        """
        return TextFile(
            name=self._path.name,
            bytes=self._num_bytes,
            sha256=self._digest.hexdigest(),
            documents=documents,
        )

    def _parts(self) -> Iterator[TextPart]:
        read = self._lines if self._path.suffix == ".jsonl" else self._plain
        try:
            with self._path.open("rb") as file:
                yield from read(file)
        except OSError as error:
            raise ArgumentError("cannot read a text file", got=f"{self._path}: {error}") from error

    def _plain(self, file: BinaryIO) -> Iterator[TextPart]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        is_valid = True
        for data, offset, is_last in self._spans(file):
            text, fault = "", None
            if is_valid:
                try:
                    text = decoder.decode(data, final=is_last)
                except UnicodeDecodeError as error:
                    byte = offset + len(data) - len(error.object) + error.start
                    fault = _not_utf8(error.object[error.start], byte)
                    is_valid = False
            yield TextPart(text, is_last, fault)
            if is_last:
                decoder.reset()
                is_valid = True

    def _spans(self, file: BinaryIO) -> Iterator[tuple[bytes, int, bool]]:
        """Yield bytes between separators, their file offset, and whether they end a document.

        Every document starts after a newline, that of the previous separator; one is added for the
        first document. A newline is held back until no separator can follow, because the newline of
        a separator is not part of the document.
        """
        start = self._take(file.read(len(codecs.BOM_UTF8)))
        data = b"\n" if start == codecs.BOM_UTF8 else b"\n" + start
        offset = self._num_bytes - len(data)  # of data[0]
        is_first = True
        while True:
            chunk = self._take(file.read(CHUNK_BYTES))
            data += chunk
            begin = 0
            for match in (_SEPARATOR if chunk else _SEPARATOR_AT_END).finditer(data):
                begin += int(is_first and match.start() > begin)
                yield data[begin : match.start()], offset + begin, True
                begin, is_first = match.end(), True
            end = _find_safe_end(data, begin) if chunk else len(data)
            if end > begin or not chunk:
                begin += int(is_first and end > begin)
                yield data[begin:end], offset + begin, not chunk
                is_first = False
            if not chunk:
                return
            data, offset = data[end:], offset + end

    def _lines(self, file: BinaryIO) -> Iterator[TextPart]:
        while line := self._take(file.readline(MAX_LINE_BYTES + 1)):
            start = self._num_bytes - len(line)
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = self._take(file.readline(CHUNK_BYTES))
                yield TextPart("", is_last=True, fault=_long_line(start))
                continue
            if not start and line.startswith(codecs.BOM_UTF8):
                line, start = line.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
            yield _parse_line(line, start)

    def _take(self, data: bytes) -> bytes:
        self._digest.update(data)
        self._num_bytes += len(data)
        return data


def _until_last(first: TextPart, parts: Iterator[TextPart]) -> Iterator[TextPart]:
    part = first
    yield part
    while not part.is_last:
        part = next(parts)
        yield part


def _find_safe_end(data: bytes, begin: int) -> int:
    """Return the end of the bytes that belong to the document whatever follows."""
    newline = data.rfind(b"\n", begin)
    line = data[newline + 1 : newline + 1 + MAX_SEPARATOR_BYTES]
    is_open = _END_OF_TEXT.startswith(line) or (
        line.startswith(_END_OF_TEXT) and _BLANKS.fullmatch(line, len(_END_OF_TEXT))
    )
    return newline if newline >= 0 and is_open and len(line) < MAX_SEPARATOR_BYTES else len(data)


def _parse_line(line: bytes, start: int) -> TextPart:
    """Parse a line of a .jsonl file.

    Args:
        line: its bytes.
        start: offset of the line in the file.
    """
    try:
        text_line = line.decode()
        if not text_line.strip():
            return TextPart("", is_last=True)
        entry = json.loads(text_line)
    except UnicodeDecodeError as error:
        fault = _not_utf8(line[error.start], start + error.start)
        return TextPart("", is_last=True, fault=fault)
    except (ValueError, RecursionError) as error:
        return TextPart("", is_last=True, fault=_not_a_document(start, str(error)[:100]))
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        return TextPart("", is_last=True, fault=_not_a_document(start, text_line[:60]))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return TextPart("", is_last=True, fault=_lone_surrogate(start, text[error.start]))
    return TextPart(text, is_last=True)


def _line_at(path: Path, offset: int) -> int:
    """Return the line number of an offset in a file."""
    line = 1
    with path.open("rb") as file:
        while chunk := file.read(min(CHUNK_BYTES, offset)):
            line, offset = line + chunk.count(b"\n"), offset - len(chunk)
    return line


def _not_utf8(byte: int, offset: int) -> DocumentFault:
    return DocumentFault(
        "a text file is not UTF-8",
        offset,
        got=f"byte {byte:#04x} at {offset}",
        expected="UTF-8",
        fix="convert the file, for example with iconv",
    )


def _not_a_document(offset: int, got: str) -> DocumentFault:
    return DocumentFault(
        "a line is not a document",
        offset,
        got=got,
        expected='a JSON object with a "text"',
        fix="correct the line",
    )


def _long_line(offset: int) -> DocumentFault:
    return DocumentFault(
        "a line is too long",
        offset,
        got=f"more than {MAX_LINE_BYTES:,} bytes",
        expected="a document per line",
        fix="put the document into a .txt file, which has no limit",
    )


def _lone_surrogate(offset: int, surrogate: str) -> DocumentFault:
    return DocumentFault(
        "a document has a lone surrogate",
        offset,
        got=f"U+{ord(surrogate):04X} alone",
        expected="text that can be encoded as UTF-8",
        fix="correct the escapes in the line",
    )
