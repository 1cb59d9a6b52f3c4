"""Reads a file that grows: whole lines with their places, a bounded piece at a time."""

import os
from collections.abc import Iterator
from pathlib import Path

PIECE = 2**20  # bytes read at once
MOST_LINE = 2**24  # a longer line is none of ours, and is passed over


def whole_lines(path: Path, begin: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """(place, line) for every whole line from a place on; what is still being written comes later.

    Args:
        path: of the file; a link is not followed.
        begin: where a line begins.
        end: lines that begin there or later are left out; None: until the end of the file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        file.seek(begin)
        rest, place, is_passing = b"", begin, False
        while piece := file.read(PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if end is not None and place >= end:
                    return
                if not is_passing:
                    yield place, line
                place, is_passing = place + len(line) + 1, False
            if len(rest) > MOST_LINE:
                place, rest, is_passing = place + len(rest), b"", True


def identity(path: Path) -> str:
    """Names a file as long as it only grows: its number on the disk and how it begins."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb", buffering=0) as file:
        begin = file.read(4096).partition(b"\n")[0][:256]
        return f"{os.fstat(file.fileno()).st_ino}:{begin.hex()}"
