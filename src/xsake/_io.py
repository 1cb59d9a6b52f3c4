"""Files: atomic replacement, append-only logs, and local paths."""

import os
import re
import tempfile
from pathlib import Path
from typing import IO

from xsake.errors import ArgumentError

_TORN = b"~\n"  # terminates a partial line with a byte that JSON does not have
# `Path` joins the slashes of gs://bucket/run to gs:/bucket/run: both are recognised.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def atomic_write(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a reader sees the old content or the new, never a part.

    Args:
        path: of the file; its folder must exist.
        content: the whole file; text is written as UTF-8.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class JsonlLog:
    """Append-only file of lines that survives a crash in the middle of an append.

    A partial last line is terminated before the next one, so it never parses and never joins it.
    The file is opened for each append: a log may be moved, and a full disk may get space, between
    two of them. After an error the same line can be appended again.

    Args:
        path: of the file; its folder must exist at the first append.
    """

    def __init__(self, path: Path):
        self._path = path
        self._is_torn: bool | None = None  # unknown before the first append

    def append(self, *lines: str, sync: bool = False) -> None:
        """Append lines.

        Args:
            lines: JSON, without line ends.
            sync: return only when they are on the disk.
        """
        with self._path.open("ab+", buffering=0) as file:
            if self._is_torn is None:
                self._is_torn = _ends_within_line(file)
            for line in lines:
                data = (_TORN if self._is_torn else b"") + line.encode() + b"\n"
                self._is_torn = True
                while data:
                    data = data[file.write(data) :]
                self._is_torn = False
            if sync:
                os.fsync(file.fileno())


def require_local(*paths: str | Path | None) -> None:
    """Raise for a path that is an address such as `gs://bucket/run`.

    Args:
        paths: as they were given; None is skipped.

    Example:
        >>> require_local("runs/one", None)
    """
    for path in paths:
        if path is not None and _ADDRESS.match(str(path)):
            scheme, _, rest = str(path).partition(":/")
            raise ArgumentError(
                "remote-path",
                f"{scheme}:// is not supported: data, checkpoints and metrics are local files",
                got=f"{scheme}://{rest.lstrip('/')}",
                expected="a folder that is mounted on this machine",
                fix="mount the storage and give the path of the mount; a local folder whose name "
                "ends with a colon needs an absolute path",
            )


def _ends_within_line(file: IO[bytes]) -> bool:
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"
