"""Manifest of a step: digest of every file, fingerprint of every array.

The file is written after Orbax has committed a step. Orbax' metadata has the same record without
the files, so a step whose process died before writing the manifest can be verified by array.
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
from xsake.training.checkpoints.damage import DamagedError, from_os_error

NAME = "MANIFEST.json"
FORMAT = 1
MAX_BYTES = 2**26
MAX_CONTAINERS = 2**21  # arrays, objects or strings
MAX_STEP = 2**31 - 1  # int32
MAX_THREADS = 8
# `ocdbt.process_3` and `array_metadatas/process_3`: Orbax' names for the part of one process.
_WRITER = re.compile(r"(?:^|/)(?:ocdbt\.)?process_([0-9]{1,9})(?=/|$)")

Verify = Literal["full", "size", "off"]
Count = Annotated[int, Field(ge=0)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LeafRecord(Frozen, strict=True):
    """Array of the saved tree."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    fingerprint: Annotated[int, Field(ge=0, lt=2**32)]


class DevicePlacement(Frozen, strict=True):
    """Devices that held the tree."""

    platform: str
    devices: Count
    processes: Count
    axes: dict[str, Count] = Field(description="mesh sizes by axis; empty without a mesh")


class CheckpointRecord(Frozen, strict=True):
    """Content of a checkpoint, known before anything is written.

    Attributes:
        format: version of this record.
        step: number of the step.
        utc: start of the save.
        leaves: of the tree, in tree order.
        placement: devices that held the tree.
        versions: of the libraries, by name.
        extra: JSON that the run saves with its arrays.
    """

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    utc: str
    leaves: tuple[LeafRecord, ...]
    placement: DevicePlacement
    versions: dict[str, str]
    extra: dict[str, JsonValue]


class ManifestFile(Frozen, strict=True):
    """Committed file; the path is relative to the step's folder, with slashes."""

    path: str
    size: Count
    blake2b: Digest


class Manifest(CheckpointRecord):
    """Record with all files of the step except the manifest."""

    files: tuple[ManifestFile, ...]


def seal(value: CheckpointRecord) -> str:
    """Return a record or manifest as JSON with a digest of its content, a line per file or leaf."""
    document = value.model_dump(mode="json")
    document["digest"] = _hash_text(_canonical(document))
    return _json.dumps(document, {"files": 1, "leaves": 1})


def unseal[Model: CheckpointRecord](model: type[Model], data: bytes) -> Model:
    """Parse the output of `seal`; any changed character raises an `ArgumentError`.

    A format of another version raises a `CheckpointError`; that is not damage.

    Args:
        model: `CheckpointRecord` or `Manifest`.
        data: untrusted text.
    """
    what = "a manifest as it was written"
    document = _json.loads(data, what=what, max_bytes=MAX_BYTES, max_containers=MAX_CONTAINERS)
    digest = document.pop("digest", None)
    try:
        text = _canonical(document)
    except ValueError as error:
        raise _json.invalid_file(what, str(error)) from error
    if digest != _hash_text(text):
        raise _json.invalid_file(what, "the digest does not match the content")
    if document.get("format") != FORMAT:  # undamaged, of another version
        raise CheckpointError(
            "a checkpoint has a format that this version of XSAKE does not support",
            got=f"format {document.get('format')!r}, written by {document.get('versions')}"[:300],
            expected=f"format {FORMAT}",
            fix="use the version that wrote it; the step was not changed",
        )
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise _json.invalid_file(what, describe_first(error)) from error


def seal_and_verify(value: CheckpointRecord) -> str:
    """Return a record as text; raise if it could not be read back."""
    text = seal(value)
    try:
        unseal(type(value), text.encode())
    except ArgumentError as error:
        raise ArgumentError(
            "the record exceeds the limits of a manifest",
            got=error.got,
            expected=f"at most {MAX_BYTES} bytes, {_json.MAX_KEYS} keys in an object of "
            f"`extra`, and {_json.MAX_DEPTH} levels",
            fix="save less in `extra`, or large values in the tree",
        ) from error
    return text


def check_extra(extra: dict[str, Any]) -> dict[str, Any]:
    """Return `extra` if JSON preserves it; raise otherwise."""
    try:
        text = json.dumps(extra, ensure_ascii=False, allow_nan=False)
        is_same = json.loads(text.encode()) == extra
        problem = "JSON changes it: tuples, or keys that are not strings"
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


def hash_share(folder: Path, process: int, num_processes: int) -> tuple[ManifestFile, ...]:
    """Hash and sync the files of a step that one process has written.

    Files without a process number belong to process 0. Shares of processes beyond `num_processes`,
    in a step of a larger run, are divided among the existing ones.

    Args:
        folder: of the step, committed or not.
        process: index of the process.
        num_processes: number of processes.
    """

    def is_of_another(path: str) -> bool:
        writer = _WRITER.search(path)
        return writer is not None and int(writer[1]) % num_processes != process

    # Folders of other processes are not listed: that is slow with one per process.
    paths = [path for path, _ in _walk_files(folder, folder, is_of_another)]
    if process:
        paths = [path for path in paths if _WRITER.search(path)]
    with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
        return tuple(pool.map(lambda path: _hash_and_sync(folder, path), set(paths) - {NAME}))


def write(
    folder: Path, record: CheckpointRecord, files: Iterable[ManifestFile] | None = None
) -> Manifest:
    """Write the manifest of a committed step; the whole step is synced to disk on return.

    Args:
        folder: of the step.
        record: of the step.
        files: all files, hashed and synced; None: hash them here.
    """
    sizes = list_files(folder)
    files = hash_share(folder, 0, 1) if files is None else files
    files = tuple(sorted(files, key=lambda file: file.path))
    _compare_sizes(sizes, files)
    manifest = Manifest(**record.model_dump(exclude={"files"}), files=files)
    # Outside of the step: after a crash here the step must not have an unknown file.
    temporary = folder.parent / f".{folder.name}.manifest"
    with temporary.open("wb") as file:
        file.write(seal(manifest).encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / NAME)
    for directory in {folder, folder.parent, *((folder / file.path).parent for file in files)}:
        _sync_folder(directory)
    return manifest


def read(folder: Path) -> Manifest | None:
    """Return the manifest of a step, None if it has none; raises `DamagedError`."""
    path = folder / NAME
    if not path.exists() and not path.is_symlink():
        return None
    try:
        with _open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
        manifest = unseal(Manifest, data)
    except OSError as error:
        raise from_os_error(error, path, folder) from error
    except ArgumentError as error:
        raise DamagedError("manifest", NAME, got=error.got) from error
    if str(manifest.step) != folder.name:
        raise DamagedError("manifest", NAME, got=f"of step {manifest.step}", expected=folder.name)
    return manifest


def verify(
    folder: Path, manifest: Manifest, mode: Verify, process: int = 0, num_processes: int = 1
) -> None:
    """Raise `DamagedError` unless a step's files match its manifest.

    Links and special files raise in every mode.

    Args:
        folder: of the step.
        manifest: of the step.
        mode: `full` reads every byte, `size` compares names and sizes, `off` nothing.
        process: index of this process; it reads its share of the files.
        num_processes: number of processes that verify the step together.
    """
    sizes = list_files(folder)
    if mode == "off":
        return
    _compare_sizes(sizes, manifest.files)
    if mode == "full":
        files = sorted(manifest.files, key=lambda file: (file.size, file.path))[
            process::num_processes
        ]
        with concurrent.futures.ThreadPoolExecutor(_num_threads()) as pool:
            digests = pool.map(lambda file: _hash_file(folder, file.path), files)
            for file, digest in zip(files, digests, strict=True):
                if digest != file.blake2b:
                    raise DamagedError("digest", file.path, got=digest, expected=file.blake2b)


def list_files(folder: Path) -> dict[str, int]:
    """Return sizes of all files of a step by relative path; links raise `DamagedError`."""
    if folder.is_symlink():
        raise DamagedError("symlink", folder.name, got="a symbolic link", expected="a folder")
    return dict(_walk_files(folder, folder))


def _compare_sizes(sizes: dict[str, int], files: Iterable[ManifestFile]) -> None:
    """Raise `DamagedError` unless the files have these names and sizes."""
    recorded = {file.path: file for file in files}
    missing, unknown = recorded.keys() - sizes.keys(), sizes.keys() - recorded.keys() - {NAME}
    if missing:
        raise DamagedError(
            "missing", min(missing), got=f"{len(missing)} of {len(recorded)} files missing"
        )
    if unknown:
        raise DamagedError("extra", min(unknown), got=f"{len(unknown)} files not in {NAME}")
    for path, file in recorded.items():
        if sizes[path] != file.size:
            raise DamagedError("size", path, got=f"{sizes[path]} bytes", expected=file.size)


def _walk_files(
    directory: Path, folder: Path, is_skipped: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[str, int]]:
    try:
        entries = sorted(directory.iterdir())
        for entry in entries:
            name = entry.relative_to(folder).as_posix()
            if is_skipped(name):
                continue
            mode = entry.lstat()
            if stat.S_ISLNK(mode.st_mode):
                raise DamagedError("symlink", name, got=f"-> {str(entry.readlink())!r}"[:200])
            if stat.S_ISDIR(mode.st_mode):
                yield from _walk_files(entry, folder, is_skipped)
            elif stat.S_ISREG(mode.st_mode):
                yield name, mode.st_size
            else:
                raise DamagedError("special", name, got=stat.filemode(mode.st_mode))
    except OSError as error:
        raise from_os_error(error, directory, folder) from error


def _hash_and_sync(folder: Path, path: str) -> ManifestFile:
    with _open_regular(folder / path) as file:
        digest = _hash_stream(file)
        os.fsync(file.fileno())
        return ManifestFile(path=path, size=os.fstat(file.fileno()).st_size, blake2b=digest)


def _hash_file(folder: Path, path: str) -> str:
    try:
        with _open_regular(folder / path) as file:
            return _hash_stream(file)
    except OSError as error:
        raise from_os_error(error, folder / path, folder) from error


def _open_regular(path: Path):
    """Open a regular file without following a link."""
    # Without O_NONBLOCK opening a pipe would block.
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    return os.fdopen(handle, "rb")


def _hash_stream(file) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()


def _hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _canonical(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, allow_nan=False, separators=(",", ":"))


def _sync_folder(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support it for folders
            raise
    finally:
        os.close(handle)


def _num_threads() -> int:
    return min(MAX_THREADS, os.cpu_count() or 1)
