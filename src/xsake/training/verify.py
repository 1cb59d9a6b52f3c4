"""Verification of saved steps: manifest of file digests, damage, quarantine, retention.

`MANIFEST.json` is written after Orbax has committed a step. Orbax' metadata has the same record
without the files, so a step whose process died before writing the manifest is verified by array.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, ValidationError

from xsake import _json
from xsake._schema import Frozen, describe_first
from xsake.errors import ArgumentError, CheckpointError

MANIFEST = "MANIFEST.json"
FORMAT = 1
MAX_BYTES = 2**26
MAX_CONTAINERS = 2**21  # arrays, objects or strings
MAX_STEP = 2**31 - 1  # int32
MAX_THREADS = 8
# `ocdbt.process_3` and `array_metadatas/process_3`: Orbax' names for the part of one process.
_WRITER = re.compile(r"(?:^|/)(?:ocdbt\.)?process_([0-9]{1,9})(?=/|$)")
_NUMBER = r"(?:0|[1-9][0-9]{0,9})"
_STEP = re.compile(_NUMBER)
_QUARANTINED = re.compile(rf"{_NUMBER}\.quarantined-[a-z0-9-]+")
# Temporary folders of Orbax and of this package.
_UNFINISHED = re.compile(
    rf"{_NUMBER}\.orbax-checkpoint-tmp.*|\.{_NUMBER}\.(manifest|deleted|probe)"
)
# Errors of this process or its user, not of the file.
_PROCESS_ERRORS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Verify = Literal["full", "size", "off"]
Count = Annotated[int, Field(ge=0)]
DamageReason = Literal[
    "symlink",  # the step is a symbolic link or contains one
    "special",  # contains an entry that is neither a file nor a folder
    "absent",  # the folder is missing
    "manifest",  # the manifest was changed
    "record",  # neither a manifest nor Orbax metadata: unfinished, damaged or of another program
    "missing",  # a file of the manifest is missing
    "extra",  # a file is not in the manifest
    "size",  # a file has another size
    "digest",  # a file has other bytes
    "unreadable",  # I/O error
    "load",  # Orbax cannot load it
    "fingerprint",  # an array has other bits than were saved
    "superseded",  # not damaged: training went back and saved an earlier step
]


class DamagedError(CheckpointError):
    """A step that must not be used; `file` is relative to the step's folder."""

    def __init__(
        self, reason: DamageReason, file: str, *, got: object = None, expected: object = None
    ):
        self.reason, self.file = reason, file
        super().__init__(
            f"damaged-{reason}", f"a checkpoint is damaged ({reason}): {file}",
            got=got, expected=expected,
            fix="restore an earlier step; `CheckpointStore.restore` does this automatically",
        )  # fmt: skip

    @property
    def summary(self) -> str:
        """The damage in one line."""
        return f"{self.reason}, {self.file}{'' if self.got is None else f': {self.got}'}"


def from_os_error(error: OSError, file: Path, folder: Path) -> CheckpointError:
    """Return the error for an unreadable file: damage, unless this process is the cause."""
    name = file.relative_to(folder).as_posix() if file != folder else folder.name
    if error.errno in _PROCESS_ERRORS:
        return CheckpointError(
            "checkpoint-unreadable",
            "a checkpoint cannot be validated: this process cannot read it",
            got=f"{file}: {error.strerror}", expected="readable files",
            fix="give the process the permissions or resources; the step was not changed",
        )  # fmt: skip
    if error.errno == errno.ELOOP:
        return DamagedError("symlink", name, got="a symbolic link", expected="a regular file")
    is_missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    return DamagedError("missing" if is_missing else "unreadable", name, got=error.strerror)


# ---------- record and manifest ----------


class LeafRecord(Frozen, strict=True):
    """Array of the saved tree."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    fingerprint: Annotated[int, Field(ge=0, lt=2**32)]


class DevicePlacement(Frozen, strict=True):
    """Devices that held the tree; `axes` are the mesh sizes, empty without a mesh."""

    platform: str
    devices: Count
    processes: Count
    axes: dict[str, Count]


class CheckpointRecord(Frozen, strict=True):
    """Content of a checkpoint, known before anything is written."""

    format: Literal[1] = 1  # version of this record
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]  # number of the step
    utc: str  # start of the save
    leaves: tuple[LeafRecord, ...]  # of the tree, in tree order
    placement: DevicePlacement  # devices that held the tree
    versions: dict[str, str]  # of the libraries, by name
    extra: dict[str, JsonValue]  # JSON that the run saves with its arrays


class ManifestFile(Frozen, strict=True):
    """Committed file; the path is relative to the step's folder, with slashes."""

    path: str
    size: Count
    blake2b: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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
            "checkpoint-format",
            "a checkpoint has a format that this version of XSAKE does not support",
            got=f"format {document.get('format')!r}, written by {document.get('versions')}"[:300],
            expected=f"format {FORMAT}",
            fix="use the version that wrote it; the step was not changed",
        )
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        raise _json.invalid_file(what, describe_first(error)) from error


def check_extra(extra: dict[str, Any]) -> None:
    """Raise unless JSON preserves `extra`."""
    try:
        text = json.dumps(extra, ensure_ascii=False, allow_nan=False)
        problem = "JSON changes it: tuples, or keys that are not strings"
        is_same = json.loads(text.encode()) == extra
    except (TypeError, ValueError, RecursionError) as error:
        is_same, problem = False, str(error)[:200]
    if not is_same:
        raise ArgumentError(
            "extra-json", "`extra` is not plain JSON", got=problem,
            expected="dictionaries with string keys, lists, strings, finite numbers, booleans",
            fix="convert tuples to lists and arrays to numbers before saving",
        )  # fmt: skip


def seal_record(record: CheckpointRecord) -> str:
    """Return a record as text; raise if it could not be read back."""
    text = seal(record)
    try:
        unseal(CheckpointRecord, text.encode())
    except ArgumentError as error:
        raise ArgumentError(
            "record-size", "the record exceeds the limits of a manifest", got=error.got,
            expected=f"at most {MAX_BYTES} bytes, {_json.MAX_KEYS} keys in an object of "
            f"`extra`, and {_json.MAX_DEPTH} levels",
            fix="save less in `extra`, or large values in the tree",
        ) from error  # fmt: skip
    return text


def hash_share(folder: Path, process: int, num_processes: int) -> tuple[ManifestFile, ...]:
    """Hash and sync the files of a step that one process has written.

    Files without a process number belong to process 0. Shares of processes beyond `num_processes`,
    in a step of a larger run, are divided among the existing ones.
    """

    def is_of_another(path: str) -> bool:
        writer = _WRITER.search(path)
        return writer is not None and int(writer[1]) % num_processes != process

    # Folders of other processes are not listed: that is slow with one per process.
    paths = [path for path, _ in _walk_files(folder, folder, is_of_another)]
    if process:
        paths = [path for path in paths if _WRITER.search(path)]
    with _threads() as pool:
        return tuple(pool.map(lambda path: _hash_and_sync(folder, path), set(paths) - {MANIFEST}))


def write_manifest(
    folder: Path, record: CheckpointRecord, files: Iterable[ManifestFile]
) -> Manifest:
    """Write the manifest of a committed step whose files are all hashed; sync the step to disk."""
    files = tuple(sorted(files, key=lambda file: file.path))
    _compare_sizes(list_files(folder), files)
    manifest = Manifest(**record.model_dump(exclude={"files"}), files=files)
    # Outside of the step: after a crash here the step must not have an unknown file.
    temporary = folder.parent / f".{folder.name}.manifest"
    with temporary.open("wb") as file:
        file.write(seal(manifest).encode())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(folder / MANIFEST)
    for directory in {folder, folder.parent, *((folder / file.path).parent for file in files)}:
        _sync_folder(directory)
    return manifest


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of a step, None if it has none; raises `DamagedError`."""
    path = folder / MANIFEST
    if not path.exists() and not path.is_symlink():
        return None
    try:
        with _open_regular(path) as file:
            manifest = unseal(Manifest, file.read(MAX_BYTES + 1))
    except OSError as error:
        raise from_os_error(error, path, folder) from error
    except ArgumentError as error:
        raise DamagedError("manifest", MANIFEST, got=error.got) from error
    if str(manifest.step) != folder.name:
        got = f"of step {manifest.step}"
        raise DamagedError("manifest", MANIFEST, got=got, expected=folder.name)
    return manifest


def verify_files(
    folder: Path, manifest: Manifest, mode: Verify, process: int = 0, num_processes: int = 1
) -> None:
    """Raise `DamagedError` unless a step's files match its manifest.

    `full` reads every byte, `size` compares names and sizes, `off` nothing; links and special files
    raise in every mode. Of several processes, each one reads its share of the files.
    """
    sizes = list_files(folder)
    if mode == "off":
        return
    _compare_sizes(sizes, manifest.files)
    if mode == "full":
        files = sorted(manifest.files, key=lambda file: (file.size, file.path))
        files = files[process::num_processes]
        with _threads() as pool:
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
    recorded = {file.path: file.size for file in files}
    missing, unknown = recorded.keys() - sizes.keys(), sizes.keys() - recorded.keys() - {MANIFEST}
    if missing:
        got = f"{len(missing)} of {len(recorded)} files missing"
        raise DamagedError("missing", min(missing), got=got)
    if unknown:
        raise DamagedError("extra", min(unknown), got=f"{len(unknown)} files not in {MANIFEST}")
    for path, size in recorded.items():
        if sizes[path] != size:
            raise DamagedError("size", path, got=f"{sizes[path]} bytes", expected=size)


def _walk_files(
    directory: Path, folder: Path, is_skipped: Callable[[str], bool] = lambda _: False
) -> Iterator[tuple[str, int]]:
    try:
        for entry in sorted(directory.iterdir()):
            name = entry.relative_to(folder).as_posix()
            if is_skipped(name):
                continue
            status = entry.lstat()
            if stat.S_ISLNK(status.st_mode):
                raise DamagedError("symlink", name, got=f"-> {str(entry.readlink())!r}"[:200])
            if stat.S_ISDIR(status.st_mode):
                yield from _walk_files(entry, folder, is_skipped)
            elif stat.S_ISREG(status.st_mode):
                yield name, status.st_size
            else:
                raise DamagedError("special", name, got=stat.filemode(status.st_mode))
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
    """Open a file without following a link, and without waiting for a pipe."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    return os.fdopen(os.open(path, flags), "rb")


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


def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1))


# ---------- folder of steps ----------


def list_steps(folder: Path) -> list[int]:
    """Return the numbers of all entries named like a step, ascending; links count."""
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    numbers = (int(name) for name in names if _STEP.fullmatch(name))
    return sorted(number for number in numbers if number <= MAX_STEP)


def list_committed_steps(folder: Path) -> list[int]:
    """Return the numbers of the steps that Orbax has committed, ascending."""
    paths = ((step, folder / str(step)) for step in list_steps(folder))
    return [step for step, path in paths if path.is_dir() and not path.is_symlink()]


def list_quarantined_steps(folder: Path) -> list[Path]:
    """Return the paths of quarantined steps; a run never reads them.

    A folder without steps is a new start only if it has no quarantined steps either.
    """
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if _QUARANTINED.fullmatch(path.name))


def quarantine(folder: Path, step: int, reason: DamageReason) -> Path:
    """Rename a step to `<step>.quarantined-<reason>`, so that no run uses it."""
    target, count = folder / f"{step}.quarantined-{reason}", 1
    while target.exists() or target.is_symlink():
        count += 1
        target = folder / f"{step}.quarantined-{reason}-{count}"
    (folder / str(step)).rename(target)
    return target


def is_valid(folder: Path, step: int) -> bool:
    """Return whether a step has a manifest and files of the names and sizes in it."""
    path = folder / str(step)
    try:
        manifest = read_manifest(path)
        if manifest is not None:
            verify_files(path, manifest, "size")
    except DamagedError:
        return False
    return manifest is not None


def delete_old_steps(folder: Path, max_to_keep: int) -> list[int]:
    """Delete the steps older than the `max_to_keep` newest valid ones; return their numbers."""
    steps = list_committed_steps(folder)
    num_valid = 0
    for step in reversed(steps):
        num_valid += is_valid(folder, step)
        if num_valid == max_to_keep:
            old = [other for other in steps if other < step]
            for other in old:
                _delete_step(folder, other)
            return old
    return []


def _delete_step(folder: Path, step: int) -> None:
    """Delete a step; renamed first, so that a crash leaves no step with half of its files."""
    trash = folder / f".{step}.deleted"
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(trash)
    os.rename(folder / str(step), trash)
    shutil.rmtree(trash)


def remove_temporary(folder: Path) -> None:
    """Delete the remains of interrupted saves and deletions; no save may be running."""
    for path in folder.iterdir():
        if not _UNFINISHED.fullmatch(path.name):
            continue
        if path.is_dir() and not path.is_symlink():
            # Threads of a failed save may still be writing; the rest is deleted next time.
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
