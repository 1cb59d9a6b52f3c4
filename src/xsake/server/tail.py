"""Read complete lines of a growing file with bounded memory and without following links."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

MAX_LINE = 2**24  # bytes; a longer line is skipped
_BUFFER = 2**16


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; raises OSError for links, pipes, devices and folders.

    The folder of the file must not be a link either.

    Args:
        path: of the file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.parent, flags | os.O_DIRECTORY)
    try:
        handle = os.open(path.name, flags | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(22, "Not a regular file")
    return os.fdopen(handle, "rb", buffering=_BUFFER)


def stat_regular(path: Path) -> os.stat_result:
    """Return lstat of a regular file; raise OSError for anything else."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(22, "Not a regular file")
    return status


class LineReader:
    """Read complete lines from an offset; an unfinished last line is left for later.

    Args:
        file: from `open_regular`.
        offset: start of a line in bytes.
        is_inside_long: whether the offset is inside a line above the size limit.
    """

    def __init__(self, file: BinaryIO, offset: int, *, is_inside_long: bool = False):
        self._file, self.is_inside_long = file, is_inside_long
        self.seek(offset)

    def seek(self, offset: int) -> None:
        """Continue at the start of another line."""
        self.offset = offset
        self._file.seek(offset)

    def next_line(self) -> bytes | None:
        """Return the next complete line without its newline; None at the end of the file.

        A line above the size limit is skipped in chunks: the first chunk returns an invalid line,
        the others return empty lines. `offset` is the position of the next read.
        """
        text = self._file.readline(MAX_LINE)
        is_complete, was_inside = text.endswith(b"\n"), self.is_inside_long
        if not is_complete and len(text) < MAX_LINE and not (was_inside and text):
            return None
        self.offset += len(text)
        self.is_inside_long = not is_complete
        if was_inside:
            return b""
        return text[:-1] if is_complete else b"\0"


def file_identity(path: Path) -> str:
    """Return an identity of an append-only file: its inode and the start of its first line."""
    with open_regular(path) as file:
        begin = file.read(4096).partition(b"\n")[0][:256]
        return f"{os.fstat(file.fileno()).st_ino}:{begin.hex()}"
