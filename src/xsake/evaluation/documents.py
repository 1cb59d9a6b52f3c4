"""Texts from files as documents with stable names; decodes strictly and splits, nothing more."""

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.evaluation.record import TextFile

MOST_BYTES = 2**30  # of all files together: documents are held in memory
PLAIN = (".txt", ".raw")
SEPARATOR = re.compile(r"^<\|endoftext\|>[ \t]*\r?(?:\n|\Z)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Document:
    """A text that is evaluated on its own.

    Args:
        name: the same for the same text at the same place of a file of the same name.
        text: exactly as it was written.
        title: what its file calls it, if it does.
    """

    name: str
    text: str
    title: str | None = None


@dataclasses.dataclass(frozen=True)
class Texts:
    """Documents in the order of their files, and what these files were."""

    documents: tuple[Document, ...]
    files: tuple[TextFile, ...]


def read_texts(paths: Sequence[Path]) -> Texts:
    """Documents of files and of folders of .txt files.

    Args:
        paths: .txt and .raw files, one document or several that a line `<|endoftext|>` ends;
            .jsonl files, an object with `text` per line and perhaps `id` or `title`; folders.

    Returns:
        Every document that is not blank.

    Example:
        >>> import pathlib
        >>> _ = pathlib.Path("two.txt").write_text("One.\\n<|endoftext|>\\nTwo.\\n")
        >>> [document.text for document in read_texts([pathlib.Path("two.txt")]).documents]
        ['One.', 'Two.\\n']
    """
    documents, files, left = [], [], MOST_BYTES
    for path in list_files(paths):
        content = _content(path, left)
        left -= len(content)
        text = _decoded(path, content)
        found = list(_lines(path, text) if path.suffix == ".jsonl" else _plain(path, text))
        documents += found
        digest = hashlib.sha256(content).hexdigest()
        files.append(
            TextFile(name=path.name, bytes=len(content), sha256=digest, documents=len(found))
        )
    if not documents:
        raise ArgumentError(
            "there is no text to evaluate on",
            got=", ".join(str(path) for path in paths),
            expected="at least one document that is not blank",
        )
    names = [document.name for document in documents]
    if len(set(names)) < len(names):
        raise ArgumentError(
            "a document is there twice",
            got=next(name for name in names if names.count(name) > 1),
            expected="every text once",
            fix="name each file once",
        )
    return Texts(tuple(documents), tuple(files))


def list_files(paths: Sequence[Path]) -> Iterator[Path]:
    """The text files among paths, and those of folders; refuses what is none.

    Args:
        paths: as `read_texts` takes them.
    """
    for path in paths:
        found = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not found or not all(one.is_file() for one in found):
            raise ArgumentError(
                "there is no such text", got=path, expected="a file, or a folder of .txt files"
            )
        if not path.is_dir() and path.suffix not in (*PLAIN, ".jsonl"):
            raise ArgumentError(
                "this kind of text file is not known",
                got=path.name,
                expected=f"{', '.join(PLAIN)} or .jsonl",
                fix="rename the file after what it holds",
            )
        yield from found


def _content(path: Path, room: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(room + 1)
    except OSError as error:
        raise ArgumentError("a text cannot be read", got=f"{path}: {error}") from error
    if len(content) > room:
        raise ArgumentError(
            "the texts are too large",
            got=f"{path.name} ends beyond {MOST_BYTES:,} bytes in total",
            expected=f"at most {MOST_BYTES:,} bytes together",
            fix="evaluate on a part of them",
        )
    return content


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ArgumentError(
            "a text is not UTF-8",
            got=f"{path.name}, line {line}: byte {content[error.start]:#04x} at {error.start}",
            expected="UTF-8",
            fix="convert the file, for example with iconv",
        ) from error


def _plain(path: Path, text: str) -> Iterator[Document]:
    parts = SEPARATOR.split(text)
    # A newline before the separator ends its last line; a lone document stays as it is.
    cut = [part.removesuffix("\n") for part in parts[:-1]] + parts[-1:]
    for number, part in enumerate(cut, start=1):
        if part.strip():
            yield Document(_name(path, number, part), part)


def _lines(path: Path, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _bad_line(path, number, str(error)[:100]) from error
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise _bad_line(path, number, line[:60])
        title = entry.get("title", entry.get("id"))
        if entry["text"].strip():
            name = _name(path, number, entry["text"])
            yield Document(name, entry["text"], None if title is None else str(title)[:200])


def _name(path: Path, number: int, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{path.name}#{number}-{digest[:8]}"


def _bad_line(path: Path, number: int, got: str) -> ArgumentError:
    return ArgumentError(
        "a line is not a document",
        got=f"{path.name}, line {number}: {got}",
        expected='a JSON object with a "text"',
    )
