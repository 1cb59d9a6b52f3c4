"""Lock of a run's folder: a file with a lease that its holder renews.

The holder writes a new beat into the file four times per lease. A process with the same boot and
PID namespace asks the system whether the holder's process is alive. Any other process watches the
beats by its own clock: a beat proves that the holder is alive, a whole lease without one that it
is dead. Clocks of two hosts are never compared.
"""

import contextlib
import datetime
import fcntl
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from xsake._schema import Frozen
from xsake.errors import ArgumentError

NAME = "run.lock"
MAX_BYTES = 2**12
LEASE_SECONDS, MAX_LEASE_SECONDS = 60.0, 3600.0
_BEATS, _POLLS = 4, 40  # per lease
_REPORT_SECONDS = 10.0
_FORCE = "take the lock with `xsake train --take-lock`"
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOG = logging.getLogger(__name__)

_Name = Annotated[str, Field(max_length=100)]


class LeaseLostError(ArgumentError):
    """Another run has taken the folder of this run."""


class LockHolder(Frozen, strict=True):
    """Process that holds the lock of a folder."""

    pid: Annotated[int, Field(ge=1, lt=2**31)]  # in its own PID namespace
    host: Annotated[str, Field(max_length=255)]  # name of the host or container
    # boot ID and start in ticks since boot, if available; distinguishes reused PIDs
    started: _Name | None
    # when it took the lock, by its own clock; for display only
    utc: Annotated[str, Field(max_length=40)]
    namespace: _Name | None = None  # PID namespace
    token: _Name | None = None  # random and unique to this lock
    # validity without a heartbeat; None: a lock of 0.1.0, which has no heartbeat
    lease_seconds: Annotated[float, Field(gt=0, le=MAX_LEASE_SECONDS)] | None = None
    # number of renewals in 12 digits, so that the size of the file is constant
    beat: Annotated[str, Field(pattern=r"^[0-9]{12}$")] = "0" * 12

    @classmethod
    def current(cls, lease_seconds: float) -> "LockHolder":
        """Return a holder for this process."""
        return cls(
            pid=os.getpid(),
            host=socket.gethostname(),
            started=process_start(os.getpid()),
            utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            namespace=_namespace(),
            token=secrets.token_hex(16),
            lease_seconds=lease_seconds,
        )

    def next_beat(self) -> "LockHolder":
        """Return the holder after one more renewal."""
        return self.model_copy(update={"beat": f"{(int(self.beat) + 1) % 10**12:012d}"})

    def is_same(self, other: "LockHolder | None") -> bool:
        """Return whether another record is of the same lock, at any beat."""
        return other is not None and self.model_copy(update={"beat": other.beat}) == other

    @property
    def is_comparable(self) -> bool:
        """Whether the holder's PID means the same process here: same boot, same PID namespace."""
        is_same_host = self.host == socket.gethostname()
        if self.lease_seconds is None:  # a lock of 0.1.0 has no namespace
            return is_same_host
        if self.started is None or self.namespace is None:  # a system without /proc
            return is_same_host and _namespace() is None
        return self.started.partition(" ")[0] == boot_id() and self.namespace == _namespace()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs; only valid if `is_comparable`."""
        if not _is_running(self.pid):
            return False
        return self.started is None or process_start(self.pid) in (None, self.started)

    def encode(self) -> bytes:
        """Return the content of the lock file, of the same size at every beat."""
        return self.model_dump_json().encode() + b"\n"


class Lease:
    """Lock held by this process, renewed by a thread."""

    def __init__(self, path: Path, holder: LockHolder, lease_seconds: float):
        self._path, self.holder, self._lease = path, holder, lease_seconds
        self._taker: LockHolder | None = None
        self._renewed = time.monotonic()
        self._guard, self._end = threading.Lock(), threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)
        self._thread.start()

    def require(self, *, reread: bool = False) -> None:
        """Raise `LeaseLostError` if another run has taken the folder.

        Args:
            reread: read the file now; otherwise only if the last beat is older than half a lease,
                such as after a suspension of this process.
        """
        if reread or time.monotonic() - self._renewed > self._lease / 2:
            self._renew()
        if (taker := self._taker) is not None:
            raise LeaseLostError(
                "lease-lost",
                "another run has taken the folder of this run",
                got=f"process {taker.pid} on {taker.host} holds {self._path} since {taker.utc}",
                expected=f"the lock of this process, {self.holder.pid} on {self.holder.host}",
                fix="stop one of the runs. This process was suspended, or disconnected from the "
                f"folder, for more than the lease of {self._lease:g} s, or the lock was forced",
            )

    def release(self) -> None:
        """Stop renewing the lock, and delete the file if this process still holds it."""
        self._end.set()
        if self.holder.pid != os.getpid():
            return  # a child of the holder
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            if self.holder.is_same(read_holder(self._path.parent)):
                self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._end.wait(self._lease / _BEATS):
            self._renew()

    def _renew(self) -> None:
        """Write the next beat if this process still holds the lock, else record the new holder.

        The file is changed in place, never replaced: a beat after a takeover goes to the deleted
        file and does not overwrite the new holder.
        """
        with self._guard:
            try:
                with _open(self._path, os.O_RDWR) as file:
                    holder = _decode(os.read(file, MAX_BYTES))
                    if self.holder.is_same(holder):
                        self.holder = self.holder.next_beat()
                        os.pwrite(file, self.holder.encode(), 0)
                        os.fsync(file)
                        self._renewed, self._has_warned = time.monotonic(), False
                    elif holder is not None:
                        self._taker = holder
            except FileNotFoundError:
                # If another process creates the file, the next beat sees that.
                with contextlib.suppress(OSError):
                    _create(self._path, self.holder)
            except OSError as error:
                if not self._has_warned:
                    self._has_warned = True
                    _LOG.warning("cannot renew the lock of the run, retrying: %s", error)


@contextlib.contextmanager
def run_lock(
    folder: Path,
    *,
    is_forced: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    report: Callable[[str], None] = _LOG.warning,
) -> Iterator[Lease]:
    """Hold the lock of a folder while the block runs.

    The lock of a dead process is taken over immediately if this process can check it: same boot of
    the same host, same PID namespace, and the PID is free or was reused. Any other lock is watched:
    a beat raises an error, a lease without a beat is a takeover. Locks of 0.1.0 have no beats; on
    another host they raise an error.

    Args:
        folder: created if missing.
        is_forced: take the lock from any holder; a living one fails at its next beat.
        lease_seconds: how long others wait for a beat before they take the folder.
        report: gets a line when this process starts to wait, and every 10 s.

    Yields:
        The lease; call `require` before writes that only the holder may do.
    """
    if not 0 < lease_seconds <= MAX_LEASE_SECONDS:
        raise ArgumentError(
            "lease", "invalid lease", got=lease_seconds, expected="above 0, at most 3600 s"
        )
    folder.mkdir(parents=True, exist_ok=True)
    holder = LockHolder.current(lease_seconds)
    _take(folder / NAME, holder, report, is_forced=is_forced)
    lease = Lease(folder / NAME, holder, lease_seconds)
    try:
        yield lease
    finally:
        lease.release()


def read_holder(folder: Path) -> LockHolder | None:
    """Return the holder of a folder, dead or alive; None without a valid lock file."""
    try:
        return _decode(_read(folder / NAME) or b"")
    except OSError:
        return None


# ---------- taking the lock ----------


def _take(
    path: Path, current: LockHolder, report: Callable[[str], None], *, is_forced: bool
) -> None:
    """Create the lock file as soon as no living process holds the lock."""
    stale: bytes | None = None
    while True:
        with _exclusive(path.parent):
            try:
                content = _read(path)
            except OSError as error:
                if not is_forced:
                    raise _unreadable_error(path) from error
                content = b""
            if is_forced or content is None or content == stale or _is_dead(path, content):
                if content is not None:
                    path.unlink()
                _create_or_raise(path, current)
                break
        stale = _wait_for_lease(path, content, report)
    if stale is not None:
        # Another host may take over from the same dead holder: the last to create the file wins.
        time.sleep(_lease_of_holder(_decode(stale)) / _POLLS)
        if not current.is_same(read_holder(path.parent)):
            raise _taken_error(path)


def _is_dead(path: Path, content: bytes) -> bool:
    """Return whether the holder is certainly dead; raise if it is alive, False: unknown."""
    holder = _decode(content)
    if holder is None:
        if content:
            raise _unreadable_error(path)
        return False  # the holder is about to write it, or died before
    if holder.is_comparable:
        if holder.is_alive:
            raise _held_error(holder, path)
        return True
    if holder.lease_seconds is None:
        raise ArgumentError(
            "folder-held-elsewhere",
            "a run on another host holds this folder, or died without releasing it",
            got=f"process {holder.pid} on {holder.host}, since {holder.utc}, with a lock of 0.1.0",
            expected="one run per folder",
            fix=f"check on {holder.host} whether it still runs (`ps -p {holder.pid}`); if not, "
            f"{_FORCE}, or delete {path}",
        )
    return False


def _wait_for_lease(path: Path, content: bytes, report: Callable[[str], None]) -> bytes | None:
    """Return the content of a lock file after a lease without a beat; raise if there is a beat.

    None: the file was deleted or completed and has to be read again. Time counts only while the
    file is readable: a hanging file system hides beats.
    """
    holder = _decode(content)
    lease = _lease_of_holder(holder)
    poll, waited, next_report = lease / _POLLS, 0.0, 0.0
    who = "a process" if holder is None else f"process {holder.pid} on {holder.host}"
    while waited < lease:
        if waited >= next_report:
            next_report += _REPORT_SECONDS
            report(
                f"{who} holds {path.parent} and may be dead: waiting {lease - waited:.0f} s for a "
                "heartbeat before taking over"
            )
        started = time.monotonic()
        time.sleep(poll)
        with contextlib.suppress(OSError):
            now = _read(path)
            if now != content:
                if now is None or not content:
                    return None
                raise _held_error(_decode(now) or holder, path)
            waited += min(time.monotonic() - started, 2 * poll)
    report(f"{who} had no heartbeat for {lease:.0f} s: taking over the run")
    return content


def _lease_of_holder(holder: LockHolder | None) -> float:
    return LEASE_SECONDS if holder is None or holder.lease_seconds is None else holder.lease_seconds


def _held_error(holder: LockHolder | None, path: Path) -> ArgumentError:
    if holder is None:
        return _taken_error(path)
    is_own = holder.pid == os.getpid() and holder.is_comparable
    host = "this host" if holder.is_comparable else holder.host
    return ArgumentError(
        "folder-held",
        "this process already holds the folder" if is_own else "another run holds this folder",
        got=f"process {holder.pid} on {host}, since {holder.utc}", expected="one run per folder",
        fix="call run_lock once"
        if is_own
        else f"wait for it, stop it, use another folder, or {_FORCE}",
    )  # fmt: skip


def _unreadable_error(path: Path) -> ArgumentError:
    return ArgumentError(
        "lock-unreadable", "the lock file of the folder is not readable", got=path,
        expected="a lock file of `xsake train`", fix=f"if no run uses the folder, delete {path}",
    )  # fmt: skip


def _taken_error(path: Path) -> ArgumentError:
    return ArgumentError(
        "lock-race", "another run took this folder at the same time",
        got=path, expected="one run per folder",
        fix="use another folder",
    )  # fmt: skip


# ---------- the file ----------


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Serialize processes of this host: two must not take over the same lock."""
    with _open(folder, os.O_RDONLY | os.O_DIRECTORY) as handle:
        # Some network file systems do not support flock; file creation is atomic there, too.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _open(path: Path, flags: int) -> Iterator[int]:
    """Open a file without following a link or waiting for a pipe."""
    file = os.open(path, flags | _FLAGS, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def _create_or_raise(path: Path, current: LockHolder) -> None:
    try:
        _create(path, current)
    except FileExistsError as error:
        raise _taken_error(path) from error
    except OSError as error:
        raise ArgumentError(
            "lock-unwritable", "the lock file cannot be created", got=f"{path}: {error.strerror}",
            expected="a writable folder", fix="free disk space, or use another folder",
        ) from error  # fmt: skip


def _create(path: Path, current: LockHolder) -> None:
    """Create the file, which must not exist, with its content in a single write."""
    with _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        try:
            os.write(file, current.encode())
            os.fsync(file)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _read(path: Path) -> bytes | None:
    """Return the bytes of a lock file; None if missing. A link or a folder raises."""
    try:
        with _open(path, os.O_RDONLY) as file:
            return os.read(file, MAX_BYTES)
    except FileNotFoundError:
        return None


def _decode(content: bytes) -> LockHolder | None:
    try:
        return LockHolder.model_validate_json(content)
    except ValidationError:
        return None


# ---------- processes of this host ----------


def boot_id() -> str | None:
    """Return the ID of this boot of the host, if available."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def process_start(pid: int) -> str | None:
    """Return boot ID and start time in ticks, which differ for every process with this PID."""
    state, boot = read_proc_stat(pid), boot_id()
    return None if state is None or boot is None else f"{boot} {state[19]}"


def read_proc_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process name, from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _namespace() -> str | None:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return None


def _is_running(pid: int) -> bool:
    state = read_proc_stat(pid)
    if state is not None:
        return state[0] not in ("Z", "X")  # a zombie is dead
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
