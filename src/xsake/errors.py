"""The errors XSAKE raises: what is wrong, what it got, what was expected and how to fix it."""

import json
import re

MAX_PART_CHARS = 4000  # of each part of a message
PROSE = "\n\t\u00a0\u2009\u200a\u200c\u200d\u202f\u3000"  # unprintable, harmless in running text


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Escape every character that a terminal may obey, or that hides or reorders its neighbours.

    These are all that `str.isprintable` refuses: C0 and C1 controls, direction overrides, lone
    surrogates. The escapes are those of JSON, so JSON text stays the same document.

    Args:
        text: from a file, a model or a command line.
        keep: characters to leave as they are; `PROSE` for text of several lines.

    Example:
        >>> escape_controls("\x1b[31mred"), escape_controls("a\nb", keep=PROSE)
        ('\\u001b[31mred', 'a\nb')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


class XsakeError(Exception):
    """Base of every error raised on purpose; `code` is stable and has an entry in the docs.

    Args:
        what: one sentence on what is wrong.
        got: the offending value.
        expected: what would have been accepted.
        fix: what the caller can do about it.

    All four often quote files of strangers. They are kept as printable text of at most
    `MAX_PART_CHARS` characters each; lines after the first are indented, so that no quotation
    passes for another part.

    Attributes:
        is_transient: the same command may succeed the next time; commands end with 1, not 2.
    """

    code = "XSK-000"
    is_transient = False

    def __init__(self, what: str, *, got: object = None, expected: object = None, fix: str = ""):
        self.what, self.fix = _quote(what), _quote(fix)
        self.got = None if got is None else _quote(str(got))
        self.expected = None if expected is None else _quote(str(expected))
        parts = [f"{self.code}: {self.what}"]
        if self.got is not None:
            parts.append(f"  got:      {self.got}")
        if self.expected is not None:
            parts.append(f"  expected: {self.expected}")
        if self.fix:
            parts.append(f"  fix:      {self.fix}")
        super().__init__("\n".join(parts))


def _quote(text: str) -> str:
    """A part of a message: printable, of bounded length, its later lines indented."""
    text = re.sub(r"\n[ \n]*", "\n" + " " * 12, text[: MAX_PART_CHARS + 1])
    text = escape_controls(text, keep="\n")
    return text if len(text) <= MAX_PART_CHARS else text[: MAX_PART_CHARS - 3] + "..."


class ShapeError(XsakeError, ValueError):
    """Arrays whose shapes or dtypes do not fit each other."""

    code = "XSK-101"


class ArgumentError(XsakeError, ValueError):
    """A value outside what the parameter accepts, or parameters that contradict each other."""

    code = "XSK-102"


class MaskError(XsakeError, ValueError):
    """A mask that cannot mean what was written."""

    code = "XSK-201"


class LayoutError(XsakeError, ValueError):
    """A block layout that breaks an invariant or does not fit the arrays it is used with."""

    code = "XSK-301"


class UnsupportedError(XsakeError, NotImplementedError):
    """A named implementation that cannot serve this call; nothing else was tried."""

    code = "XSK-401"


class MissingExtraError(XsakeError, ImportError):
    """A feature whose optional dependency is not installed."""

    code = "XSK-501"


class CheckpointError(XsakeError, ValueError):
    """A checkpoint that cannot be trusted, read whole, or written as asked."""

    code = "XSK-601"
