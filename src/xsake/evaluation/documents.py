"""Text documents with stable names from .txt, .raw and .jsonl files, and source code."""

import collections
import dataclasses
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from xsake import _json
from xsake.errors import ArgumentError
from xsake.evaluation.record import TextFile

MAX_BYTES = 2**30  # of all files, which are held in memory
PLAIN = (".txt", ".raw")
NOT_LIBRARY = ("idlelib", "site-packages", "test", "tests")  # folders of the standard library
SEPARATOR = re.compile(r"^<\|endoftext\|>[ \t]*\r?(?:\n|\Z)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class TextDocument:
    """A text with its name: file, number in the file, start of the text's digest.

    `title` is the `title` or `id` of a .jsonl line.
    """

    name: str
    text: str
    title: str | None = None


@dataclasses.dataclass(frozen=True)
class Texts:
    """Documents in file order, and the files."""

    documents: tuple[TextDocument, ...]
    files: tuple[TextFile, ...]


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read documents of files and of folders of .txt files.

    Args:
        paths: .txt and .raw files, with documents separated by lines `<|endoftext|>`; .jsonl
            files, one object per line with `text` and optional `id` or `title`; folders.

    Returns:
        Every document that is not blank.

    Example:
        >>> import pathlib
        >>> _ = pathlib.Path("two.txt").write_text("One.\\n<|endoftext|>\\nTwo.\\n")
        >>> [document.text for document in read_texts([pathlib.Path("two.txt")]).documents]
        ['One.', 'Two.\\n']
    """
    documents, files, remaining = [], [], MAX_BYTES
    for path in list_files(paths):
        content = _read_bytes(path, remaining)
        remaining -= len(content)
        split = _parse_jsonl if path.suffix == ".jsonl" else _split_plain
        parts = list(split(path, _decode(path, content)))
        documents += parts
        digest = hashlib.sha256(content).hexdigest()
        files.append(
            TextFile(name=path.name, bytes=len(content), sha256=digest, documents=len(parts))
        )
    if not documents:
        got, expected = ", ".join(map(str, paths)), "at least one document that is not blank"
        raise ArgumentError("no-text", "no text to evaluate", got=got, expected=expected)
    name, count = collections.Counter(document.name for document in documents).most_common(1)[0]
    if count > 1:
        raise ArgumentError(
            "duplicate-text",
            "duplicate document",
            got=name,
            expected="every text once",
            fix="pass each file once",
        )
    return Texts(tuple(documents), tuple(files))


def read_code(paths: Sequence[Path] = ()) -> Texts:
    """Read Python source files; hidden folders are skipped.

    Args:
        paths: .py files, and folders of them; empty: Python's standard library.

    Returns:
        A document per file, named by its path in the folder, and one entry of `files` per path.
    """
    documents, files, remaining = [], [], MAX_BYTES
    for path in paths or [Path(sysconfig.get_path("stdlib"))]:
        folder, names = _list_code(path, is_library=not paths)
        digest, start, size = hashlib.sha256(), len(documents), 0
        for name in names:
            content = _read_bytes(folder / name, remaining - size)
            size += len(content)
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            text = _decode(folder / name, content)
            documents.append(TextDocument(name, text.replace("\r\n", "\n")))
        remaining -= size
        number = len(documents) - start
        files.append(
            TextFile(name=path.name, bytes=size, sha256=digest.hexdigest(), documents=number)
        )
    return Texts(tuple(documents), tuple(files))


def _list_code(path: Path, *, is_library: bool) -> tuple[Path, list[str]]:
    """Return a folder and the names of its source files; those of the library are not tests."""
    folder, files = path, path.rglob("*.py")
    if is_library:
        files = (x for x in (*path.glob("*.py"), *path.glob("*/*.py")) if _is_library(x))
    elif path.is_file() and path.suffix == ".py":
        folder, files = path.parent, [path]
    names = (file.relative_to(folder) for file in files)
    shown = sorted(x.as_posix() for x in names if not any(y.startswith(".") for y in x.parts))
    if not shown:
        expected = "a .py file, or a folder with .py files"
        raise ArgumentError("code-not-found", "no source code", got=path, expected=expected)
    return folder, shown


def _is_library(file: Path) -> bool:
    return file.parent.name not in NOT_LIBRARY


def list_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield the text files of paths and folders; raise for others."""
    for path in paths:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            expected = "a file, or a folder of .txt files"
            raise ArgumentError("text-not-found", "text not found", got=path, expected=expected)
        if not path.is_dir() and path.suffix not in (*PLAIN, ".jsonl"):
            raise ArgumentError(
                "text-type",
                "unknown type of text file",
                got=path.name,
                expected=f"{', '.join(PLAIN)} or .jsonl",
                fix="rename the file to match its content",
            )
        yield from files


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    content = _json.read(path, max_bytes=max_bytes)
    if len(content) > max_bytes:
        limit = f"{MAX_BYTES:,} bytes in total"
        raise ArgumentError(
            "texts-too-large",
            "the texts are too large",
            got=f"{path.name} exceeds {limit}",
            expected=f"at most {limit}",
            fix="evaluate a part of them",
        )
    return content


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ArgumentError(
            "text-utf8",
            "a text is not UTF-8",
            got=f"{path.name}, line {line}: byte {content[error.start]:#04x} at {error.start}",
            expected="UTF-8",
            fix="convert the file, for example with iconv",
        ) from error


def _split_plain(path: Path, text: str) -> Iterator[TextDocument]:
    parts = SEPARATOR.split(text)
    # Remove the newline before a separator; a single document stays unchanged.
    parts = [part.removesuffix("\n") for part in parts[:-1]] + parts[-1:]
    for number, part in enumerate(parts, start=1):
        if part.strip():
            yield TextDocument(_name(path, number, part), part)


def _parse_jsonl(path: Path, text: str) -> Iterator[TextDocument]:
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
            yield TextDocument(name, entry["text"], None if title is None else str(title)[:200])


def _name(path: Path, number: int, text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{path.name}#{number}-{digest[:8]}"


def _bad_line(path: Path, number: int, got: str) -> ArgumentError:
    return ArgumentError(
        "document-line",
        "invalid .jsonl document",
        got=f"{path.name}, line {number}: {got}",
        expected='a JSON object with a "text"',
    )
