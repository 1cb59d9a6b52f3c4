"""Sanitize compiler messages for publication: short, plain, without local paths."""

import re
from pathlib import Path
from typing import TextIO

MAX_CHARACTERS = 2000
TAIL_LINES = 12
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def read_tail(log: TextIO) -> str:
    """Return the last lines of a log."""
    log.seek(0)
    return "\n".join(log.read().strip().splitlines()[-TAIL_LINES:])


def sanitize(message: str, names: dict[str, str]) -> str:
    """Replace folders by names, remove colors and truncate the middle of a message.

    Args:
        message: compiler message.
        names: replacements by folder.

    Example:
        >>> sanitize("error in /somewhere/lib/x.py", {"/somewhere": "<environment>"})
        'error in <environment>/lib/x.py'
    """
    plain = _COLOURS.sub("", message).strip()
    replacements = names | {str(Path(__file__).parents[1]): "xsake", str(Path.home()): "~"}
    for folder in sorted(replacements, key=len, reverse=True):
        plain = plain.replace(folder, replacements[folder])
    if len(plain) <= MAX_CHARACTERS:
        return plain
    head, tail = plain[: MAX_CHARACTERS * 2 // 3], plain[-MAX_CHARACTERS // 3 :]
    return f"{head}\n[... {len(plain) - len(head) - len(tail)} characters omitted ...]\n{tail}"
