"""The cache folder of the server: indexes of runs, in a place where only the server writes."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from xsake.errors import ArgumentError

_MAX_SERVERS = 16  # that share a folder
_MAX_IDLE_SECONDS = 30 * 86400.0  # an index that no server has used for so long is deleted


def default_folder() -> Path:
    """Where indexes are kept: the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache") / "xsake" / "serve"


class Cache:
    """A folder for the indexes of one server. Servers that share a folder have a part each.

    Args:
        folder: made if it does not exist; must belong to the user of the server. None: a temporary
            folder that is deleted at the end.
    """

    def __init__(self, folder: Path | None):
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._lock: int | None = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="xsake-serve-")
            self.folder = Path(self._temporary.name)
            return
        self.folder = self._take_part(make_own_folder(folder))
        self._delete_old()

    def _take_part(self, folder: Path) -> Path:
        """The first part of a folder that no other server has; held until `close`."""
        for number in range(_MAX_SERVERS):
            part = folder / f"server-{number}"
            part.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(part / "lock", flags, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock = lock
            return part
        raise ArgumentError(
            "too many servers share a cache folder",
            got=folder,
            expected=f"at most {_MAX_SERVERS} at once",
            fix="give --cache another folder",
        )

    def _delete_old(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and time.time() - path.stat().st_mtime > _MAX_IDLE_SECONDS:
                shutil.rmtree(path)

    def index_folder(self, run: str) -> Path:
        """Return the folder of a run's index; it need not exist yet.

        Args:
            run: its id.
        """
        folder = self.folder / run
        if folder.is_dir():
            os.utime(folder)
        return folder

    def close(self) -> None:
        """Let other servers use the folder; delete it if it is temporary."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            self._temporary.cleanup()


def make_own_folder(folder: Path) -> Path:
    """Make a folder for the server alone; raises ArgumentError if others could write there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        found = folder.stat()
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ArgumentError(
            "the cache folder cannot be used",
            got=f"{folder}: {error.strerror}",
            expected="a folder that the server can write",
            fix="give --cache another folder",
        ) from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o002:
        raise ArgumentError(
            "others could write into the cache folder",
            got=folder,
            expected="a folder of this user that others cannot write",
            fix="give --cache a folder that does not exist yet",
        )
    return folder
