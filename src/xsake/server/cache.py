"""Cache folder of run indexes, private to the server."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from xsake.errors import ArgumentError

_MAX_SERVERS = 16  # per folder
_MAX_IDLE_SECONDS = 30 * 86400.0  # unused indexes are deleted after this time


def default_folder() -> Path:
    """Return the default folder, in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return Path(cache or Path.home() / ".cache") / "xsake" / "serve"


class IndexCache:
    """Folder of the indexes of one server; servers that share a folder use separate slots.

    None is a temporary folder that is deleted at the end.
    """

    def __init__(self, folder: Path | None):
        self._temporary: tempfile.TemporaryDirectory | None = None
        self._lock: int | None = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="xsake-serve-")
            self.folder = Path(self._temporary.name)
            return
        self.folder = self._lock_slot(make_private_folder(folder))
        for path in self.folder.iterdir():
            if path.name != "lock" and time.time() - path.stat().st_mtime > _MAX_IDLE_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _lock_slot(self, folder: Path) -> Path:
        """Lock the first free slot of a folder until `close`."""
        for number in range(_MAX_SERVERS):
            slot = folder / f"server-{number}"
            slot.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            lock = os.open(slot / "lock", flags, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            self._lock = lock
            return slot
        raise ArgumentError(
            "cache-servers", "too many servers share a cache folder", got=folder,
            expected=f"at most {_MAX_SERVERS} at once", fix="set --cache to another folder",
        )  # fmt: skip

    def index_path(self, run: str) -> Path:
        """Return the path of the index of a run, which may not exist yet; it counts as used."""
        path = self.folder / f"{run}.sqlite"
        if path.exists():
            os.utime(path)
        return path

    def close(self) -> None:
        """Unlock the slot or delete the temporary folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._temporary is not None:
            self._temporary.cleanup()


def make_private_folder(folder: Path) -> Path:
    """Create a private folder; raise ArgumentError if other users can write to it."""
    problem = "writable by others"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve(strict=True)
        status = folder.stat()
        is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o002
        if is_private and os.access(folder, os.W_OK):
            return folder
        problem = "Permission denied" if is_private else problem
    except OSError as error:
        problem = error.strerror or type(error).__name__
    raise ArgumentError(
        "cache-folder", "the cache folder is not usable", got=f"{folder}: {problem}",
        expected="a writable folder of this user that is not world-writable",
        fix="set --cache to another folder",
    )  # fmt: skip
