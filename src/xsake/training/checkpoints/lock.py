"""One run per folder: a lock file with a lease that its holder renews while it lives.

The holder writes a new beat into the file four times per lease. A process that sees the holder's
process number (same boot, same PID namespace) asks the system whether it lives. Any other process
watches the beats by its own clock: a beat proves life, a whole lease without one proves death. No
clocks of two hosts are compared.
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
from xsake.training.checkpoints.holder import MAX_BYTES, Holder, decode

NAME = "run.lock"
LEASE_SECONDS = 60.0
_BEATS = 4  # per lease
_POLLS = 40  # per lease
_REPORT_SECONDS = 10.0
_FORCE = "take it by force: `xsake train --take-lock`"
_LOG = logging.getLogger(__name__)


class LeaseLostError(ArgumentError):
    """Another run has taken the folder of this one."""


class Lease:
    """A folder that this process holds, and the thread that renews its lock.

    Args:
        path: of the lock file.
        own: what the file says about this process.
    """

    def __init__(self, path: Path, own: Holder):
        assert own.lease_seconds is not None
        self._path, self._own, self._lease = path, own, own.lease_seconds
        self._taker: Holder | None = None
        self._renewed = time.monotonic()
        self._guard, self._end = threading.Lock(), threading.Event()
        self._has_warned = False
        self._thread = threading.Thread(target=self._beat, name="run lock", daemon=True)

    @property
    def holder(self) -> Holder:
        """What the lock file says about this process."""
        return self._own

    def require(self, *, is_fresh: bool = False) -> None:
        """Raise `LeaseLostError` if another run has taken the folder.

        Args:
            is_fresh: read the file now; otherwise only if the last beat is half a lease old, as
                after this process was suspended.
        """
        if is_fresh or time.monotonic() - self._renewed > self._lease / 2:
            self._renew()
        if self._taker is not None:
            taker = self._taker
            raise LeaseLostError(
                "another run has taken the folder of this run",
                got=f"process {taker.pid} on {taker.host} holds {self._path} since {taker.utc}",
                expected=f"the lock of this process, {self._own.pid} on {self._own.host}",
                fix="stop one of them. This process was suspended, or cut off from the folder, for "
                f"longer than the lease of {self._lease:g} s, or the lock was taken by force",
            )

    def start(self) -> None:
        """Begin to renew the lock."""
        self._thread.start()

    def release(self) -> None:
        """Stop renewing the lock, and delete the file if it is still of this process."""
        self._end.set()
        if self._own.pid != os.getpid():
            return  # a child of the holder
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(OSError):
            if self._own.is_same(holder(self._path.parent)):
                self._path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._end.wait(self._lease / _BEATS):
            self._renew()

    def _renew(self) -> None:
        """Write the next beat if the file is still of this process, and note who took it if not.

        The file is changed in place, never replaced: a beat that comes after a takeover goes to a
        file without a name and does not overwrite the new holder's.
        """
        with self._guard:
            try:
                file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                with contextlib.suppress(OSError):  # a file that another creates decides later
                    _create(self._path, self._own)
                return
            except OSError as error:
                self._warn(error)
                return
            try:
                found = decode(os.read(file, MAX_BYTES))
                if self._own.is_same(found):
                    self._own = self._own.next_beat()
                    os.pwrite(file, self._own.encode(), 0)
                    os.fsync(file)
                    self._renewed, self._has_warned = time.monotonic(), False
                elif found is not None:
                    self._taker = found
            except OSError as error:
                self._warn(error)
            finally:
                with contextlib.suppress(OSError):
                    os.close(file)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _LOG.warning("the lock of the run cannot be renewed for now: %s", error)


@contextlib.contextmanager
def run_lock(
    folder: Path,
    *,
    is_forced: bool = False,
    lease_seconds: float = LEASE_SECONDS,
    report: Callable[[str], None] = _LOG.warning,
) -> Iterator[Lease]:
    """Keep a folder for this process while the block runs.

    The lock of a process that is dead beyond doubt is taken over at once: this process sees its
    number (same boot of the same machine, same PID namespace), and the number is free or belongs
    to a process that started at another time. Any other lock is watched: it is refused as soon
    as a beat comes, and taken over when none comes for the lease of its holder. Locks of 0.1.0
    have no beats; on another machine they are refused.

    Args:
        folder: made if it is not there.
        is_forced: take the lock from any holder; one that lives ends at its next beat.
        lease_seconds: how long others wait for a sign of life before they take the folder.
        report: gets a line when this process starts to wait, and every 10 s while it waits.

    Yields:
        The lease, to be asked before anything is written that must not be written twice.
    """
    if not 0 < lease_seconds <= LEASE_SECONDS * 60:
        raise ArgumentError(
            "a lease has no such length", got=lease_seconds, expected="above 0, at most 3600 s"
        )
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    lease = Lease(path, _take(path, Holder.own(lease_seconds), report, is_forced=is_forced))
    lease.start()
    try:
        yield lease
    finally:
        lease.release()


def holder(folder: Path) -> Holder | None:
    """Return the holder of a folder, dead or alive; None: no lock, or a file that is not one."""
    try:
        return decode(_content(folder / NAME) or b"")
    except OSError:
        return None


def _take(path: Path, own: Holder, report: Callable[[str], None], *, is_forced: bool) -> Holder:
    """Create the lock file, as soon as no living process holds the folder."""
    stale: bytes | None = None
    while True:
        with _alone(path.parent):
            content = _look(path, is_forced=is_forced)
            if is_forced or content is None or content == stale or _is_dead(path, content):
                if content is not None:
                    path.unlink()
                _create_or_refuse(path, own)
                break
        stale = _watch(path, content, report)
    if stale is not None:
        # Another machine may have watched the same dead holder: the last to create the file wins.
        time.sleep(_lease(decode(stale)) / _POLLS)
        if not own.is_same(holder(path.parent)):
            raise _taken(path)
    return own


def _look(path: Path, *, is_forced: bool) -> bytes | None:
    try:
        return _content(path)
    except OSError as error:
        if is_forced:
            return b""
        raise _unreadable(path) from error


def _is_dead(path: Path, content: bytes) -> bool:
    """Whether the holder is dead beyond doubt; raises if it is alive, False: not known."""
    found = decode(content)
    if found is None:
        if content:
            raise _unreadable(path)
        return False  # its holder is about to write it, or died there
    if found.is_comparable:
        if found.is_alive:
            raise _refusal(found, path)
        return True
    if found.lease_seconds is None:
        raise ArgumentError(
            "a run on another machine holds this folder, or died there without giving it back",
            got=f"process {found.pid} on {found.host}, since {found.utc}, with a lock of 0.1.0",
            expected="one run per folder",
            fix=f"look on {found.host} whether it still runs (`ps -p {found.pid}`); if it does "
            f"not, {_FORCE}, or delete {path}",
        )
    return False


def _watch(path: Path, content: bytes, report: Callable[[str], None]) -> bytes | None:
    """Return the content of a lock file after a lease without a beat; raise if a beat comes.

    None: the file was given back, or written whole, and has to be looked at again. Time counts
    only while the file can be read: a file system that hangs hides beats.
    """
    found = decode(content)
    lease = _lease(found)
    poll, waited, next_report = lease / _POLLS, 0.0, 0.0
    who = "a process" if found is None else f"process {found.pid} on {found.host}"
    while waited < lease:
        if waited >= next_report:
            report(
                f"{who} holds {path.parent}, and may be dead: waiting {lease - waited:.0f} s for a "
                f"sign of life, then the run is taken over"
            )
            next_report += _REPORT_SECONDS
        began = time.monotonic()
        time.sleep(poll)
        with contextlib.suppress(OSError):
            now = _content(path)
            if now != content:
                if now is None or not content:
                    return None
                raise _refusal(decode(now) or found, path)
            waited += min(time.monotonic() - began, 2 * poll)
    report(f"{who} gave no sign of life for {lease:.0f} s: the run is taken over")
    return content


def _lease(found: Holder | None) -> float:
    return LEASE_SECONDS if found is None or found.lease_seconds is None else found.lease_seconds


def _refusal(found: Holder | None, path: Path) -> ArgumentError:
    if found is None:
        return _taken(path)
    is_own = found.pid == os.getpid() and found.is_comparable
    where = "this machine" if found.is_comparable else found.host
    return ArgumentError(
        "this process holds the folder already" if is_own else "another run holds this folder",
        got=f"process {found.pid} on {where}, since {found.utc}",
        expected="one run per folder",
        fix="take the lock once"
        if is_own
        else f"wait for it, stop it, use another folder, or {_FORCE}",
    )


def _unreadable(path: Path) -> ArgumentError:
    return ArgumentError(
        "the folder has a lock file that cannot be read",
        got=str(path),
        expected="what a run writes there",
        fix=f"if no run uses the folder, delete {path}",
    )


def _taken(path: Path) -> ArgumentError:
    return ArgumentError(
        "another run took this folder at the same moment",
        got=str(path),
        expected="one run per folder",
        fix="use another folder",
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


def _create_or_refuse(path: Path, own: Holder) -> None:
    try:
        _create(path, own)
    except FileExistsError as error:
        raise _taken(path) from error
    except OSError as error:
        raise ArgumentError(
            "the folder cannot be locked",
            got=f"{path}: {error.strerror}",
            expected="a folder to write to",
            fix="make room, or use another folder",
        ) from error


def _create(path: Path, own: Holder) -> None:
    """Create the file, which must not be there, with its content in a single write."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o644)
    try:
        try:
            os.write(file, own.encode())
            os.fsync(file)
        finally:
            os.close(file)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _content(path: Path) -> bytes | None:
    """Return the bytes of a lock file; None if there is none. A link or a folder raises."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        return os.read(file, MAX_BYTES)
    finally:
        os.close(file)
