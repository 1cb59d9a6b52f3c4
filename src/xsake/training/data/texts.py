"""Documents of one text file, of any size: read once from start to end, in parts that fit memory.

The documents are those of `xsake.evaluation.read_texts`, which holds a whole file.
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
MAX_LINE_BYTES = 2**28  # of a .jsonl file: JSON is parsed a line at a time
MAX_SEPARATOR_BYTES = 2**12  # blanks behind a separator included

_MARK = rb"\n<\|endoftext\|>[ \t]*\r?"
_SEPARATOR = re.compile(_MARK + rb"(?=\n)")
_SEPARATOR_AT_END = re.compile(_MARK + rb"(?=\n|\Z)")
_WORD = b"<|endoftext|>"
_BLANKS = re.compile(rb"[ \t]*\r?")


@dataclasses.dataclass(frozen=True)
class Fault:
    """The reason why a document cannot be used.

    Args:
        what: is wrong.
        offset: in the file, of the first byte that is wrong or of its line.
        got: the offending bytes, in words.
        expected: what could be used.
        fix: for the person who has the file.
    """

    what: str
    offset: int
    got: str
    expected: str
    fix: str

    def place(self, path: Path) -> str:
        """File, line and what is there; reads the file up to it."""
        return f"{path.name}, line {_line_at(path, self.offset)}: {self.got}"

    def error(self, path: Path) -> ArgumentError:
        """The error that refuses the file."""
        fix = f"{self.fix}, or skip such documents with --invalid skip"
        return ArgumentError(self.what, got=self.place(path), expected=self.expected, fix=fix)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a document's text, in order; a document with a fault has one part that names it."""

    text: str
    is_last: bool
    fault: Fault | None = None


class TextReader:
    """Reads one file from start to end, once.

    Args:
        path: a .txt, .raw or .jsonl file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._digest, self._num_bytes = hashlib.sha256(), 0

    def documents(self) -> Iterator[Iterator[Part]]:
        """The parts of each document, blank ones included; what a caller leaves is skipped."""
        parts = self._parts()
        for first in parts:
            document = _until_last(first, parts)
            yield document
            for _ in document:
                pass

    def identity(self, documents: int) -> TextFile:
        """What the file was, after the last document.

        Args:
            documents: that were used.
        """
        return TextFile(
            name=self._path.name,
            bytes=self._num_bytes,
            sha256=self._digest.hexdigest(),
            documents=documents,
        )

    def _parts(self) -> Iterator[Part]:
        read = self._lines if self._path.suffix == ".jsonl" else self._plain
        try:
            with self._path.open("rb") as file:
                yield from read(file)
        except OSError as error:
            raise ArgumentError("a text cannot be read", got=f"{self._path}: {error}") from error

    def _plain(self, file: BinaryIO) -> Iterator[Part]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        is_sound = True
        for data, offset, is_last in self._spans(file):
            text, fault = "", None
            if is_sound:
                try:
                    text = decoder.decode(data, final=is_last)
                except UnicodeDecodeError as error:
                    place = offset + len(data) - len(error.object) + error.start
                    fault = _not_utf8(error.object[error.start], place)
                    is_sound = False
            yield Part(text, is_last, fault)
            if is_last:
                decoder.reset()
                is_sound = True

    def _spans(self, file: BinaryIO) -> Iterator[tuple[bytes, int, bool]]:
        """Bytes between separators, their place in the file, and whether they end a document.

        Every document begins behind a newline, that of the separator before it; the first gets
        one. A newline is held back until it is certain that no separator follows: such a newline
        is none of the document's.
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
            end = _certain(data, begin) if chunk else len(data)
            if end > begin or not chunk:
                begin += int(is_first and end > begin)
                yield data[begin:end], offset + begin, not chunk
                is_first = False
            if not chunk:
                return
            data, offset = data[end:], offset + end

    def _lines(self, file: BinaryIO) -> Iterator[Part]:
        while line := self._take(file.readline(MAX_LINE_BYTES + 1)):
            start = self._num_bytes - len(line)
            if len(line) > MAX_LINE_BYTES:
                while line and not line.endswith(b"\n"):
                    line = self._take(file.readline(CHUNK_BYTES))
                yield Part("", is_last=True, fault=_long_line(start))
                continue
            if not start and line.startswith(codecs.BOM_UTF8):
                line, start = line.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
            yield _document(line, start)

    def _take(self, data: bytes) -> bytes:
        self._digest.update(data)
        self._num_bytes += len(data)
        return data


def _until_last(first: Part, parts: Iterator[Part]) -> Iterator[Part]:
    part = first
    yield part
    while not part.is_last:
        part = next(parts)
        yield part


def _certain(data: bytes, begin: int) -> int:
    """Where the bytes end that belong to the document, whatever comes behind them."""
    newline = data.rfind(b"\n", begin)
    line = data[newline + 1 : newline + 1 + MAX_SEPARATOR_BYTES]
    is_open = _WORD.startswith(line) or (
        line.startswith(_WORD) and _BLANKS.fullmatch(line, len(_WORD))
    )
    return newline if newline >= 0 and is_open and len(line) < MAX_SEPARATOR_BYTES else len(data)


def _document(line: bytes, start: int) -> Part:
    """The document on a line of a .jsonl file.

    Args:
        line: its bytes.
        start: place of the line in its file.
    """
    try:
        words = line.decode()
        if not words.strip():
            return Part("", is_last=True)
        entry = json.loads(words)
    except UnicodeDecodeError as error:
        fault = _not_utf8(line[error.start], start + error.start)
        return Part("", is_last=True, fault=fault)
    except (ValueError, RecursionError) as error:
        return Part("", is_last=True, fault=_no_document(start, str(error)[:100]))
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        return Part("", is_last=True, fault=_no_document(start, words[:60]))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return Part("", is_last=True, fault=_half_character(start, text[error.start]))
    return Part(text, is_last=True)


def _line_at(path: Path, offset: int) -> int:
    """The number of the line that a byte of a file is in."""
    line = 1
    with path.open("rb") as file:
        while chunk := file.read(min(CHUNK_BYTES, offset - file.tell())):
            line += chunk.count(b"\n")
    return line


def _not_utf8(byte: int, offset: int) -> Fault:
    return Fault(
        "a text is not UTF-8",
        offset,
        got=f"byte {byte:#04x} at {offset}",
        expected="UTF-8",
        fix="convert the file, for example with iconv",
    )


def _no_document(offset: int, got: str) -> Fault:
    return Fault(
        "a line is not a document",
        offset,
        got=got,
        expected='a JSON object with a "text"',
        fix="correct the line",
    )


def _long_line(offset: int) -> Fault:
    return Fault(
        "a line is too long",
        offset,
        got=f"more than {MAX_LINE_BYTES:,} bytes",
        expected="a document per line",
        fix="put the document into a .txt file, where it may have any length",
    )


def _half_character(offset: int, half: str) -> Fault:
    return Fault(
        "a document holds half a character",
        offset,
        got=f"U+{ord(half):04X} alone",
        expected="text that can be written as UTF-8",
        fix="correct the escapes in its line",
    )
