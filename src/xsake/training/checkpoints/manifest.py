"""The manifest of a step: every file with its digest, every array with its fingerprint.

A file is written once Orbax has committed a step. Orbax' own metadata holds the same record
without the files, so a step that lost its process before the manifest was written can still be
checked array by array.
"""

import concurrent.futures
import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError

from xsake import _json
from xsake._schema import Frozen, describe_first
from xsake.errors import ArgumentError, CheckpointError
from xsake.training.checkpoints.damage import DamagedError, of_system

NAME = "MANIFEST.json"
FORMAT = 1
MOST_BYTES = 2**26
MOST_PARTS = 2**21  # arrays, objects or strings
MOST_STEP = 2**31 - 1  # a training state counts its steps with 32 bits
MOST_THREADS = 8
# `ocdbt.process_3` and `array_metadatas/process_3`: Orbax' names for the part of one process.
_WRITER = re.compile(r"(?:^|/)(?:ocdbt\.)?process_([0-9]{1,9})(?=/|$)")

Verify = Literal["full", "size", "off"]
Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Leaf(Frozen, strict=True):
    """An array of the saved tree."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    fingerprint: Annotated[int, Field(ge=0, lt=2**32)]


class Placement(Frozen, strict=True):
    """The devices that the tree was on."""

    platform: str
    devices: Count
    processes: Count
    axes: dict[str, Count] = Field(description="sizes of the mesh, by axis; empty without one")


class Record(Frozen, strict=True):
    """What was saved, known before the first byte is written.

    Attributes:
        format: of this record.
        step: number of the step.
        utc: when the save began.
        leaves: the tree, in its own order.
        placement: where it was.
        versions: of the libraries that wrote it, by name.
        extra: whatever the run keeps beside its arrays.
    """

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0, le=MOST_STEP)]
    utc: str
    leaves: tuple[Leaf, ...]
    placement: Placement
    versions: dict[str, str]
    extra: dict[str, JsonValue]


class File(Frozen, strict=True):
    """A file as it was committed; the path is relative to the step's folder, with slashes."""

    path: str
    size: Count
    blake2b: Digest


class Manifest(Record):
    """A record, and all files of the step but the manifest itself."""

    files: tuple[File, ...]


def sealed(value: Record) -> str:
    """A record or manifest as JSON text that says whether it is still what was written.

    A line holds a file or a leaf.
    """
    document = value.model_dump(mode="json")
    document["digest"] = _digest_of(_canonical(document))
    return _json.dumps(document, {"files": 1, "leaves": 1})


def unsealed[Kind: Record](kind: type[Kind], data: bytes) -> Kind:
    """What `sealed` wrote, or an `ArgumentError`: every changed character is noticed.

    What another version sealed in a format of its own is a `CheckpointError`, and no damage.

    Args:
        kind: `Record` or `Manifest`.
        data: the text; nothing of it is trusted.
    """
    what = "a manifest as it was written"
    document = _json.loads(data, what=what, max_bytes=MOST_BYTES, max_containers=MOST_PARTS)
    digest = document.pop("digest", None)
    try:
        text = _canonical(document)
    except ValueError as error:
        raise _json.invalid_file(what, str(error)) from error
    if digest != _digest_of(text):
        raise _json.invalid_file(what, "its digest is not that of its content")
    if document.get("format") != FORMAT:  # it is sound: whoever wrote it can read it
        raise CheckpointError(
            "a checkpoint has a format that this version of XSAKE does not know",
            got=f"format {document.get('format')!r}, written by {document.get('versions')}"[:300],
            expected=f"format {FORMAT}",
            fix="use the version that wrote it; the step was left as it is",
        )
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise _json.invalid_file(what, describe_first(error)) from error


def sealed_and_checked(value: Record) -> str:
    """A record as text, if it is one that can be read back."""
    text = sealed(value)
    try:
        unsealed(type(value), text.encode())
    except ArgumentError as error:
        raise ArgumentError(
            "this would not fit into a manifest",
            got=error.got,
            expected=f"at most {MOST_BYTES} bytes, {_json.MAX_KEYS} keys in an object of "
            f"`extra`, and {_json.MAX_DEPTH} levels",
            fix="keep less in `extra`, or large things in the tree",
        ) from error
    return text


def checked_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """What a run wants kept, if JSON gives it back as it is."""
    try:
        text = json.dumps(extra, ensure_ascii=False, allow_nan=False)
        is_same = json.loads(text.encode()) == extra
        problem = "it would be read back differently: tuples, or keys that are no strings"
    except (TypeError, ValueError, RecursionError) as error:
        is_same, problem = False, str(error)[:200]
    if is_same:
        return extra
    raise ArgumentError(
        "`extra` is not plain JSON",
        got=problem,
        expected="dictionaries with string keys, lists, strings, finite numbers, booleans, None",
        fix="convert tuples to lists and arrays to numbers before saving",
    )


def hash_share(folder: Path, process: int, num_processes: int) -> tuple[File, ...]:
    """Hash and flush those files of a step that one process has written.

    Files that carry the number of no process belong to process 0. Shares of processes beyond
    `num_processes`, in a step of a larger run, are divided among those that are left.

    Args:
        folder: of the step, committed or not.
        process: the one.
        num_processes: count of all.
    """

    def is_of_another(path: str) -> bool:
        writer = _WRITER.search(path)
        return writer is not None and int(writer[1]) % num_processes != process

    # Folders of other processes are not listed: with one per process that takes long.
    paths = [path for path, _ in _files(folder, folder, is_of_another)]
    if process:
        paths = [path for path in paths if _WRITER.search(path)]
    with concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
        return tuple(pool.map(lambda path: _committed(folder, path), set(paths) - {NAME}))


def write(folder: Path, record: Record, files: Iterable[File] | None = None) -> Manifest:
    """Write the manifest of a committed step; all of the step is on the disk when this returns.

    Args:
        folder: of the step.
        record: what was saved into it.
        files: all of its files, hashed and flushed; None hashes them here.
    """
    found = listing(folder)
    files = hash_share(folder, 0, 1) if files is None else files
    files = tuple(sorted(files, key=lambda file: file.path))
    _compare(found, files)
    manifest = Manifest(**record.model_dump(exclude={"files"}), files=files)
    # Outside of the step: a process that dies here must not leave a file that nobody knows.
    temporary = folder.parent / f".{folder.name}.manifest"
    with temporary.open("wb") as file:
        file.write(sealed(manifest).encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / NAME)
    for place in {folder, folder.parent, *((folder / file.path).parent for file in files)}:
        _flush(place)
    return manifest


def read(folder: Path) -> Manifest | None:
    """The manifest of a step, None if it has none; raises `DamagedError`."""
    path = folder / NAME
    if not path.exists() and not path.is_symlink():
        return None
    try:
        with _opened(path) as file:
            data = file.read(MOST_BYTES + 1)
        manifest = unsealed(Manifest, data)
    except OSError as error:
        raise of_system(error, path, folder) from error
    except ArgumentError as error:
        raise DamagedError("manifest", NAME, got=error.got) from error
    if str(manifest.step) != folder.name:
        raise DamagedError("manifest", NAME, got=f"of step {manifest.step}", expected=folder.name)
    return manifest


def verify(
    folder: Path, manifest: Manifest, mode: Verify, process: int = 0, num_processes: int = 1
) -> None:
    """Raise `DamagedError` unless a step's files are those of its manifest.

    Links and special files are refused in every mode.

    Args:
        folder: of the step.
        manifest: of the step.
        mode: `full` reads every byte, `size` compares names and sizes, `off` nothing.
        process: the one that verifies; it reads the bytes of its share of the files.
        num_processes: count of those that verify the step together.
    """
    found = listing(folder)
    if mode == "off":
        return
    _compare(found, manifest.files)
    if mode == "full":
        files = sorted(manifest.files, key=lambda file: (file.size, file.path))[
            process::num_processes
        ]
        with concurrent.futures.ThreadPoolExecutor(_threads()) as pool:
            digests = pool.map(lambda file: _digest(folder, file.path), files)
            for file, digest in zip(files, digests, strict=True):
                if digest != file.blake2b:
                    raise DamagedError("digest", file.path, got=digest, expected=file.blake2b)


def listing(folder: Path) -> dict[str, int]:
    """Sizes of all files of a step by relative path; raises `DamagedError` at links."""
    if folder.is_symlink():
        raise DamagedError("symlink", folder.name, got="a symbolic link", expected="a folder")
    return dict(_files(folder, folder))


def _compare(found: dict[str, int], files: Iterable[File]) -> None:
    """Raise `DamagedError` unless the files have these names and sizes."""
    known = {file.path: file for file in files}
    lost, strange = known.keys() - found.keys(), found.keys() - known.keys() - {NAME}
    if lost:
        raise DamagedError("missing", min(lost), got=f"{len(lost)} of {len(known)} files missing")
    if strange:
        raise DamagedError("extra", min(strange), got=f"{len(strange)} files not in {NAME}")
    for path, file in known.items():
        if found[path] != file.size:
            raise DamagedError("size", path, got=f"{found[path]} bytes", expected=file.size)


def _files(
    place: Path, folder: Path, is_skipped: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[str, int]]:
    try:
        entries = sorted(place.iterdir())
        for entry in entries:
            name = entry.relative_to(folder).as_posix()
            if is_skipped(name):
                continue
            mode = entry.lstat()
            if stat.S_ISLNK(mode.st_mode):
                raise DamagedError("symlink", name, got=f"-> {str(entry.readlink())!r}"[:200])
            if stat.S_ISDIR(mode.st_mode):
                yield from _files(entry, folder, is_skipped)
            elif stat.S_ISREG(mode.st_mode):
                yield name, mode.st_size
            else:
                raise DamagedError("special", name, got=stat.filemode(mode.st_mode))
    except OSError as error:
        raise of_system(error, place, folder) from error


def _committed(folder: Path, path: str) -> File:
    with _opened(folder / path) as file:
        digest = _digest_of_file(file)
        os.fsync(file.fileno())
        return File(path=path, size=os.fstat(file.fileno()).st_size, blake2b=digest)


def _digest(folder: Path, path: str) -> str:
    try:
        with _opened(folder / path) as file:
            return _digest_of_file(file)
    except OSError as error:
        raise of_system(error, folder / path, folder) from error


def _opened(path: Path):
    """A regular file, opened without following a link that took its place."""
    # Without O_NONBLOCK a pipe would wait for its other end.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    return os.fdopen(handle, "rb")


def _digest_of_file(file) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":"))


def _flush(place: Path) -> None:
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system writes folders in its own time
            raise
    finally:
        os.close(handle)


def _threads() -> int:
    return min(MOST_THREADS, os.cpu_count() or 1)
