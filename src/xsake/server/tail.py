"""Whole lines of a file that grows, read without following links and without unbounded memory."""

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
    """Size, time and number of a regular file; raises OSError for anything else."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(22, "Not a regular file")
    return found


class Tail:
    """Reads whole lines from a place on; an unfinished last line is left for later.

    Args:
        file: as `open_regular` gives it.
        place: in bytes, where a line begins.
        is_inside_long: whether the place is inside a line that is too long to be used.
    """

    def __init__(self, file: BinaryIO, place: int, *, is_inside_long: bool = False):
        self._file, self.is_inside_long = file, is_inside_long
        self.seek(place)

    def seek(self, place: int) -> None:
        """Continue at the begin of another line."""
        self.place = place
        self._file.seek(place)

    def next_line(self) -> bytes | None:
        """Return the next whole line without its newline; None at the end of the file.

        A line that is too long is skipped in pieces: the first piece gives a line that cannot be
        parsed, the others give empty lines. `place` is then where the next call reads.
        """
        text = self._file.readline(MAX_LINE)
        is_whole, was_inside = text.endswith(b"\n"), self.is_inside_long
        if not is_whole and len(text) < MAX_LINE and not (was_inside and text):
            return None
        self.place += len(text)
        self.is_inside_long = not is_whole
        if was_inside:
            return b""
        return text[:-1] if is_whole else b"\0"


def file_identity(path: Path) -> str:
    """Identity of a file as long as it only grows: its inode and how it begins."""
    with open_regular(path) as file:
        begin = file.read(4096).partition(b"\n")[0][:256]
        return f"{os.fstat(file.fileno()).st_ino}:{begin.hex()}"
