"""Files of the served folders: runs and documents by opaque ids, and static pages.

Requests use ids; no path is built from request data. Symbolic links are not followed. Documents
are parsed for validation and sent as stored: serializing the parsed values would take ten times as
long.
"""

import base64
import hashlib
import io
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np

from xsake.errors import ArgumentError
from xsake.observability.log import replace_nonfinite

ArtifactType = Literal["run", "plan", "rows", "certificate"]
MAX_ARTIFACTS = 4096  # per type
MAX_ENTRIES = 500_000  # directory entries per scan
MAX_BYTES = 2**23  # of a document or one response of rows
_DEPTH = 4  # levels below the given folders
_IGNORED = frozenset({"steps", "profiles", "profile", "trackers", "metrics.index", "node_modules"})
_MAX_ROWS_BYTES = 2**25  # of a file of rows
_MAX_JSON_DEPTH = 32
_PARSING = threading.Lock()  # one document at a time, to bound memory


class Artifact(NamedTuple):
    """A run or a document."""

    id: str  # used in requests
    type: ArtifactType
    name: str
    path: Path  # of a run's folder or a document's file; never exposed


class ScanResult(NamedTuple):
    """Result of a scan."""

    artifacts: dict[ArtifactType, dict[str, Artifact]]  # at most MAX_ARTIFACTS per type
    num_omitted: dict[ArtifactType, int]
    is_truncated: bool  # whether it ended after MAX_ENTRIES files and folders


class DocumentError(Exception):
    """A document cannot be sent; the message has no path."""


def scan(folders: tuple[Path, ...]) -> ScanResult:
    """Find the runs and documents in existing folders."""
    artifacts: dict[ArtifactType, dict[str, Artifact]] = {
        "run": {}, "plan": {}, "rows": {}, "certificate": {},
    }  # fmt: skip
    num_omitted: dict[ArtifactType, int] = dict.fromkeys(artifacts, 0)
    budget = iter(range(MAX_ENTRIES))
    for root in folders:
        for folder, files in _walk(root.resolve(), _DEPTH, budget):
            for type, name, path in _match_artifacts(folder, files):
                key = os.fsencode(f"{type}:{path}")
                artifact_id = hashlib.blake2b(key, digest_size=8).hexdigest()
                name = os.fsencode(name).decode("utf-8", "replace")
                if len(artifacts[type]) < MAX_ARTIFACTS:
                    artifact = Artifact(artifact_id, type, name, path)
                    artifacts[type].setdefault(artifact_id, artifact)
                elif artifact_id not in artifacts[type]:
                    num_omitted[type] += 1
    return ScanResult(artifacts, num_omitted, next(budget, None) is None)


def _match_artifacts(folder: Path, files: set[str]) -> Iterator[tuple[ArtifactType, str, Path]]:
    if "metrics.jsonl" in files:
        yield "run", folder.name, folder
        return
    for name in sorted(files):
        stem, _, ending = name.partition(".")
        if ending == "jsonl":
            yield "rows", stem, folder / name
        elif ending == "plan.json" or (ending == "json" and stem.startswith("plan")):
            yield "plan", stem, folder / name
        elif ending == "json" and folder.name == "certificates":
            yield "certificate", stem, folder / name


def _walk(folder: Path, depth: int, budget: Iterator[int]) -> Iterator[tuple[Path, set[str]]]:
    """Yield folders with their file names; every entry consumes one unit of the budget."""
    files: set[str] = set()
    folders: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if next(budget, None) is None:
                    break
                if entry.is_file(follow_symlinks=False):
                    files.add(entry.name)
                elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    folders.append(folder / entry.name)
    except OSError:
        return
    yield folder, files
    if depth and "metrics.jsonl" not in files:
        for inner in sorted(folders):
            if inner.name not in _IGNORED:
                yield from _walk(inner, depth - 1, budget)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raise OSError for links, pipes, devices and folders.

    The folder of the file must not be a link either.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        handle = os.open(path.name, flags | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(22, "Not a regular file")
    return os.fdopen(handle, "rb", buffering=2**16)


def stat_regular(path: Path) -> os.stat_result:
    """Return lstat of a regular file; raise OSError for anything else."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(22, "Not a regular file")
    return status


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a regular file; raise OSError for links and larger files."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(27, "File too large")
    return data


def read_document(path: Path) -> bytes:
    """Read a JSON object as stored, except that non-finite numbers become null."""
    try:
        return _validate(read_regular(path, MAX_BYTES))
    except OSError as error:
        raise DocumentError(f"the document is unreadable: {error.strerror}") from error


def read_rows(path: Path, begin: int, count: int) -> tuple[list[bytes], bool]:
    """Read lines of a JSONL file; also return whether they are its last ones.

    Empty lines do not count. Returns fewer than `count` lines if they exceed the size limit of a
    response.
    """
    try:
        lines = filter(None, map(bytes.strip, io.BytesIO(read_regular(path, _MAX_ROWS_BYTES))))
    except OSError as error:
        raise DocumentError(f"the document is unreadable: {error.strerror}") from error
    rows: list[bytes] = []
    num_bytes = 0
    for number, text in enumerate(lines):
        if number < begin:
            continue
        num_bytes += len(text)
        if len(rows) == count or (rows and num_bytes > MAX_BYTES):
            return rows, False
        rows.append(_validate(text))
    return rows, True


def _validate(text: bytes) -> bytes:
    """Check that a text is a JSON object within the limits of size and depth."""
    has_nonfinite = False

    def replace(_: str) -> None:
        nonlocal has_nonfinite
        has_nonfinite = True

    data = np.frombuffer(text, np.uint8)
    # An upper bound of the depth: brackets inside strings are counted too.
    change = np.isin(data, (ord("["), ord("{"))).astype(np.int8)
    change -= np.isin(data, (ord("]"), ord("}")))
    depth = np.cumsum(change, dtype=np.int32).max(initial=0)
    if len(text) > MAX_BYTES or depth > _MAX_JSON_DEPTH:
        raise DocumentError("the document is too large or too deep")
    with _PARSING:
        try:
            document = json.loads(text.decode(), parse_constant=replace)
        except (ValueError, RecursionError) as error:
            raise DocumentError("the document is not a JSON object") from error
        if not isinstance(document, dict):
            raise DocumentError("the document is not a JSON object")
        return json.dumps(replace_nonfinite(document)).encode() if has_nonfinite else text


MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8", ".txt": "text/plain; charset=utf-8",
    ".json": "application/json", ".jsonl": "application/jsonl",
    ".gz": "application/gzip",  # compressed data, decompressed by the page
    ".svg": "image/svg+xml", ".png": "image/png", ".ico": "image/x-icon", ".webp": "image/webp",
    ".woff2": "font/woff2",
}  # fmt: skip
BUILT_IN = Path(__file__).parent / "page"
_MAX_FILE_BYTES, _MAX_TOTAL_BYTES, _MAX_FILES = 2**24, 2**27, 5000
_INLINE = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL | re.IGNORECASE)


class Site(NamedTuple):
    """Static files, loaded at startup and served from memory."""

    files: dict[str, tuple[bytes, str]]  # content and media type by path, such as /page/app.js
    script_hashes: tuple[str, ...]  # of inline scripts, for the content security policy


def read_site(folder: Path, prefix: str) -> Site:
    """Load the static files of a folder; links and other types are skipped."""
    if not (folder / "index.html").is_file():
        raise ArgumentError(
            "no-page", "the folder has no page", got=folder, expected="an index.html in it"
        )
    files: dict[str, tuple[bytes, str]] = {}
    scripts: dict[bytes, None] = {}
    left = _MAX_TOTAL_BYTES
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for path in (Path(parent) / name for name in sorted(names)):
            media_type = MEDIA_TYPES.get(path.suffix)
            if media_type is None or path.is_symlink() or len(files) >= _MAX_FILES:
                continue
            content = read_regular(path, _MAX_FILE_BYTES)
            left -= len(content)
            if left < 0:
                raise ArgumentError(
                    "page-size", "the page is too large", got=folder, expected=_MAX_TOTAL_BYTES
                )
            address = prefix + path.relative_to(folder).as_posix()
            files[address] = content, media_type
            if address.endswith("index.html"):
                files[address.removesuffix("index.html")] = content, media_type
            if media_type.startswith("text/html"):
                scripts |= dict.fromkeys(_INLINE.findall(content))
    hashes = (base64.b64encode(hashlib.sha256(x).digest()).decode() for x in scripts)
    return Site(files, tuple(hashes))
