"""Lock of a run's folder: a file with a lease that its holder renews.

The holder writes a new beat into the file four times per lease. A process with the same boot and
PID namespace asks the system whether the holder's process is alive. Any other process watches the
beats by its own clock: a beat proves that the holder is alive, a whole lease without one that it
is dead. Clocks of two hosts are never compared.
"""

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.training.checkpoints.holder import MAX_BYTES, LockHolder, decode

NAME = "run.lock"
LEASE_SECONDS = 60.0
_BEATS = 4  # per lease
_POLLS = 40  # per lease
_REPORT_SECONDS = 10.0
_FORCE = "take the lock with `xsake train --take-lock`"
_LOG = logging.getLogger(__name__)


class LeaseLostError(ArgumentError):
    """Another run has taken the folder of this run."""


class Lease:
    """Lock held by this process, renewed by a thread.

    Args:
        path: of the lock file.
        holder: this process.
    """

    def __init__(self, path: Path, holder: LockHolder):
        assert holder.lease_seconds is not None
        self._path, self._holder, self._lease = path, holder, holder.lease_seconds
        self._taker: LockHolder | None = None
        self._renewed = time.monotonic()
        self._guard, self._end = threading.Lock(), threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    @property
    def holder(self) -> LockHolder:
        """This process as recorded in the lock file."""
        return self._holder

    def require(self, *, reread: bool = False) -> None:
        """Raise `LeaseLostError` if another run has taken the folder.

        Args:
            reread: read the file now; otherwise only if the last beat is older than half a lease,
                such as after a suspension of this process.
        """
        if reread or time.monotonic() - self._renewed > self._lease / 2:
            self._renew()
        if self._taker is not None:
            taker = self._taker
            raise LeaseLostError(
                "another run has taken the folder of this run",
                got=f"process {taker.pid} on {taker.host} holds {self._path} since {taker.utc}",
                expected=f"the lock of this process, {self._holder.pid} on {self._holder.host}",
                fix="stop one of the runs. This process was suspended, or disconnected from the "
                f"folder, for more than the lease of {self._lease:g} s, or the lock was forced",
            )

    def start(self) -> None:
        """Start to renew the lock."""
        self._thread.start()

    def release(self) -> None:
        """Stop renewing the lock, and delete the file if this process still holds it."""
        self._end.set()
        if self._holder.pid != os.getpid():
            return  # a child of the holder
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            if self._holder.is_same(read_holder(self._path.parent)):
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
                file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                with contextlib.suppress(
                    OSError
                ):  # if another process creates it, the next beat sees that
                    _create(self._path, self._holder)
                return
            except OSError as error:
                self._warn(error)
                return
            try:
                holder = decode(os.read(file, MAX_BYTES))
                if self._holder.is_same(holder):
                    self._holder = self._holder.next_beat()
                    os.pwrite(file, self._holder.encode(), 0)
                    os.fsync(file)
                    self._renewed, self._has_warned = time.monotonic(), False
                elif holder is not None:
                    self._taker = holder
            except OSError as error:
                self._warn(error)
            finally:
                with contextlib.suppress(OSError):
                    os.close(file)

    def _warn(self, error: OSError) -> None:
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
    if not 0 < lease_seconds <= LEASE_SECONDS * 60:
        raise ArgumentError("invalid lease", got=lease_seconds, expected="above 0, at most 3600 s")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    lease = Lease(path, _take(path, LockHolder.current(lease_seconds), report, is_forced=is_forced))
    lease.start()
    try:
        yield lease
    finally:
        lease.release()


def read_holder(folder: Path) -> LockHolder | None:
    """Return the holder of a folder, dead or alive; None without a valid lock file."""
    try:
        return decode(_read_content(folder / NAME) or b"")
    except OSError:
        return None


def _take(
    path: Path, current: LockHolder, report: Callable[[str], None], *, is_forced: bool
) -> LockHolder:
    """Create the lock file as soon as no living process holds the lock."""
    stale: bytes | None = None
    while True:
        with _exclusive(path.parent):
            content = _read_lock(path, is_forced=is_forced)
            if is_forced or content is None or content == stale or _is_dead(path, content):
                if content is not None:
                    path.unlink()
                _create_or_raise(path, current)
                break
        stale = _wait_for_lease(path, content, report)
    if stale is not None:
        # Another host may take over from the same dead holder: the last to create the file wins.
        time.sleep(_lease_of_holder(decode(stale)) / _POLLS)
        if not current.is_same(read_holder(path.parent)):
            raise _taken_error(path)
    return current


def _read_lock(path: Path, *, is_forced: bool) -> bytes | None:
    try:
        return _read_content(path)
    except OSError as error:
        if is_forced:
            return b""
        raise _unreadable_error(path) from error


def _is_dead(path: Path, content: bytes) -> bool:
    """Return whether the holder is certainly dead; raise if it is alive, False: unknown."""
    holder = decode(content)
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
    holder = decode(content)
    lease = _lease_of_holder(holder)
    poll, waited, next_report = lease / _POLLS, 0.0, 0.0
    who = "a process" if holder is None else f"process {holder.pid} on {holder.host}"
    while waited < lease:
        if waited >= next_report:
            report(
                f"{who} holds {path.parent} and may be dead: waiting {lease - waited:.0f} s for a "
                f"heartbeat before taking over"
            )
            next_report += _REPORT_SECONDS
        started = time.monotonic()
        time.sleep(poll)
        with contextlib.suppress(OSError):
            now = _read_content(path)
            if now != content:
                if now is None or not content:
                    return None
                raise _held_error(decode(now) or holder, path)
            waited += min(time.monotonic() - started, 2 * poll)
    report(f"{who} had no heartbeat for {lease:.0f} s: taking over the run")
    return content


def _lease_of_holder(holder: LockHolder | None) -> float:
    return LEASE_SECONDS if holder is None or holder.lease_seconds is None else holder.lease_seconds


def _held_error(holder: LockHolder | None, path: Path) -> ArgumentError:
    if holder is None:
        return _taken_error(path)
    is_this_process = holder.pid == os.getpid() and holder.is_comparable
    host = "this host" if holder.is_comparable else holder.host
    return ArgumentError(
        "this process already holds the folder"
        if is_this_process
        else "another run holds this folder",
        got=f"process {holder.pid} on {host}, since {holder.utc}",
        expected="one run per folder",
        fix="call run_lock once"
        if is_this_process
        else f"wait for it, stop it, use another folder, or {_FORCE}",
    )


def _unreadable_error(path: Path) -> ArgumentError:
    return ArgumentError(
        "the lock file of the folder is not readable",
        got=str(path),
        expected="a lock file of `xsake train`",
        fix=f"if no run uses the folder, delete {path}",
    )


def _taken_error(path: Path) -> ArgumentError:
    return ArgumentError(
        "another run took this folder at the same time",
        got=str(path),
        expected="one run per folder",
        fix="use another folder",
    )


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Serialize processes of this host: two must not take over the same lock."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Some network file systems do not support flock; file creation is atomic there, too.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _create_or_raise(path: Path, current: LockHolder) -> None:
    try:
        _create(path, current)
    except FileExistsError as error:
        raise _taken_error(path) from error
    except OSError as error:
        raise ArgumentError(
            "the lock file cannot be created",
            got=f"{path}: {error.strerror}",
            expected="a writable folder",
            fix="free disk space, or use another folder",
        ) from error


def _create(path: Path, current: LockHolder) -> None:
    """Create the file, which must not exist, with its content in a single write."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o644)
    try:
        try:
            os.write(file, current.encode())
            os.fsync(file)
        finally:
            os.close(file)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _read_content(path: Path) -> bytes | None:
    """Return the bytes of a lock file; None if missing. A link or a folder raises."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.read(file, MAX_BYTES)
    finally:
        os.close(file)
