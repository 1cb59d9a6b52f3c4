"""One run per folder: a lock file that says whose it is, and outlives nobody."""

import contextlib
import datetime
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from xsake.errors import ArgumentError

NAME = "run.lock"
MOST_BYTES = 2**12
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Holder(BaseModel):
    """The process that a folder belongs to.

    Attributes:
        pid: its number.
        host: name of its machine.
        started: when it started, as far as the system tells; with it a number that was given to
            another process later is not taken for this one.
        utc: when it took the lock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pid: Annotated[int, Field(ge=1, lt=2**31)]
    host: Annotated[str, Field(max_length=255)]
    started: Annotated[str, Field(max_length=100)] | None
    utc: Annotated[str, Field(max_length=40)]

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs, if it is one of this machine."""
        if not _runs(self.pid):
            return False
        return self.started is None or _started(self.pid) in (None, self.started)


@contextlib.contextmanager
def run_lock(folder: Path, *, is_forced: bool = False) -> Iterator[Holder]:
    """Keep a folder for this process while the block runs.

    The lock of a process of this machine that has died is taken over; its number alone does not
    keep a folder, as it may belong to another process by now. Where the system does not tell when
    processes started (no /proc), a number that is in use keeps it.

    Args:
        folder: made if it is not there.
        is_forced: take the lock from whoever holds it.

    Yields:
        What the lock file says about this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = _own()
    path = folder / NAME
    with _alone(folder):
        if path.exists() or path.is_symlink():
            if not is_forced:
                _check_stale(path)
            path.unlink()
        _create(path, own)
    try:
        yield own
    finally:
        # Not in a child of this process, and not if someone took the lock by force.
        if own.pid == os.getpid() and _read(path) == own:
            path.unlink(missing_ok=True)


def holder(folder: Path) -> Holder | None:
    """Who holds a folder, dead or alive; None: nobody, or a file that is no lock."""
    return _read(folder / NAME)


def _check_stale(path: Path) -> None:
    found = _read(path)
    if found is None:
        raise ArgumentError(
            "the folder has a lock file that cannot be read",
            got=str(path),
            expected="what a run writes there",
            fix=f"if no run uses the folder, delete {path}",
        )
    if found.host != socket.gethostname():
        raise ArgumentError(
            "a run on another machine holds this folder, or died there without giving it back",
            got=f"process {found.pid} on {found.host}, since {found.utc}",
            expected="one run per folder",
            fix=f"look on {found.host} whether it still runs (`ps -p {found.pid}`); if it does "
            f"not, force the lock (run_lock(folder, is_forced=True)) or delete {path}",
        )
    if found.is_alive:
        is_own = found.pid == os.getpid()
        raise ArgumentError(
            "this process holds the folder already" if is_own else "another run holds this folder",
            got=f"process {found.pid} on this machine, since {found.utc}",
            expected="one run per folder",
            fix="take the lock once" if is_own else "wait for it, stop it, or use another folder",
        )


def _own() -> Holder:
    return Holder(
        pid=os.getpid(),
        host=socket.gethostname(),
        started=_started(os.getpid()),
        utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this machine at a time: two must not take over the same dead one's lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network file systems have no such locks; creating the file stays atomic there.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _create(path: Path, own: Holder) -> None:
    """The file appears with its content: nobody reads half of it."""
    temporary = path.with_name(f".{path.name}.{own.pid}")
    try:
        with temporary.open("wb") as file:
            file.write(own.model_dump_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileExistsError as error:
        raise ArgumentError(
            "another run took this folder at the same moment",
            got=str(path),
            expected="one run per folder",
            fix="use another folder",
        ) from error
    except OSError as error:
        raise ArgumentError(
            "the folder cannot be locked",
            got=f"{path}: {error.strerror}",
            expected="a folder to write to, on a file system with hard links",
            fix="use another folder",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path) -> Holder | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            return Holder.model_validate_json(file.read(MOST_BYTES))
    except (OSError, ValidationError):
        return None


def _runs(pid: int) -> bool:
    state = _stat(pid)
    if state is not None:
        return state[0] not in ("Z", "X")  # dead, and waiting to be noticed by its parent
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _started(pid: int) -> str | None:
    """Boot of the machine and ticks since then: the same for no two processes of one number."""
    state = _stat(pid)
    if state is None or not _BOOT.exists():
        return None
    return f"{_BOOT.read_text().strip()} {state[19]}"


def _stat(pid: int) -> list[str] | None:
    """Fields of a process from its state on; its name comes before, and may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
