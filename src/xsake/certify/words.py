"""What compilers say, fit to be published: short, plain and without this machine's paths."""

import re
from pathlib import Path
from typing import TextIO

MOST_CHARACTERS = 2000
LAST_LINES = 12
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def last_lines(log: TextIO) -> str:
    """The end of a log that a process wrote."""
    log.seek(0)
    return "\n".join(log.read().strip().splitlines()[-LAST_LINES:])


def tidy(message: str, names: dict[str, str]) -> str:
    """A message with folders under their names, without colours, and with its middle left out.

    Args:
        message: as the compiler gave it.
        names: what to write for each folder of this machine.

    Example:
        >>> tidy("no room at /somewhere/lib/x.py", {"/somewhere": "<environment>"})
        'no room at <environment>/lib/x.py'
    """
    plain = _COLOURS.sub("", message).strip()
    known = names | {str(Path(__file__).parents[1]): "xsake", str(Path.home()): "~"}
    for folder in sorted(known, key=len, reverse=True):
        plain = plain.replace(folder, known[folder])
    if len(plain) <= MOST_CHARACTERS:
        return plain
    head, tail = plain[: MOST_CHARACTERS * 2 // 3], plain[-MOST_CHARACTERS // 3 :]
    return f"{head}\n[... {len(plain) - len(head) - len(tail)} characters left out ...]\n{tail}"
