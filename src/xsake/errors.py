"""XSAKE's exceptions: what is wrong, got, expected, fix."""

import json
import re

MAX_PART_CHARS = 4000  # of each part of a message
PROSE = "\n\t\u00a0\u2009\u200a\u200c\u200d\u202f\u3000"  # not printable, harmless in text


def escape_controls(text: str, *, keep: str = "") -> str:
    r"""Escape control characters, direction overrides and lone surrogates.

    These are the characters for which `str.isprintable` is False. The escapes are those of JSON,
    so JSON text stays the same document.

    Args:
        text: untrusted text, e.g. from a file or a command line.
        keep: characters that are not escaped; `PROSE` for multi-line text.

    Example:
        >>> escape_controls("\x1b[31mred"), escape_controls("a\nb", keep=PROSE)
        ('\\u001b[31mred', 'a\nb')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else json.dumps(c)[1:-1] for c in text)


class XsakeError(Exception):
    """Base class of XSAKE's errors; `code` and `slug` are stable, texts are not.

    A message begins with both: `XSK-102.block-size: block_size must be positive`.

    Args:
        slug: name of the condition, unique among the errors of a code.
        what: what is wrong.
        got: the offending value.
        expected: accepted values.
        fix: what the caller can do.

    Parts may quote untrusted files. They are escaped and truncated to `MAX_PART_CHARS` characters;
    lines after the first are indented, so that a quotation cannot imitate another part.

    Attributes:
        is_transient: a retry may succeed; the CLI exits with 1 instead of 2.
    """

    code = "XSK-000"
    is_transient = False

    def __init__(
        self, slug: str, what: str, *, got: object = None, expected: object = None, fix: str = ""
    ):
        self.slug, self.what, self.fix = slug, _quote(what), _quote(fix)
        self.got = None if got is None else _quote(str(got))
        self.expected = None if expected is None else _quote(str(expected))
        parts = [f"{self.code}.{slug}: {self.what}"]
        if self.got is not None:
            parts.append(f"  got:      {self.got}")
        if self.expected is not None:
            parts.append(f"  expected: {self.expected}")
        if self.fix:
            parts.append(f"  fix:      {self.fix}")
        super().__init__("\n".join(parts))


def _quote(text: str) -> str:
    """Escape and truncate a part of a message, and indent its later lines."""
    text = re.sub(r"\n[ \n]*", "\n" + " " * 12, text[: MAX_PART_CHARS + 1])
    text = escape_controls(text, keep="\n")
    return text if len(text) <= MAX_PART_CHARS else text[: MAX_PART_CHARS - 3] + "..."


class ShapeError(XsakeError, ValueError):
    """Incompatible shapes or dtypes."""

    code = "XSK-101"


class ArgumentError(XsakeError, ValueError):
    """An invalid argument, or contradicting arguments."""

    code = "XSK-102"


class MaskError(XsakeError, ValueError):
    """An invalid mask or mask expression."""

    code = "XSK-201"


class LayoutError(XsakeError, ValueError):
    """A block layout that violates an invariant or does not match the arrays."""

    code = "XSK-301"


class UnsupportedError(XsakeError, NotImplementedError):
    """The requested implementation or combination does not support this call."""

    code = "XSK-401"


class MissingExtraError(XsakeError, ImportError):
    """An optional dependency is not installed."""

    code = "XSK-501"


class CacheError(XsakeError, RuntimeError):
    """A KV cache without room for a request."""

    code = "XSK-302"


class CheckpointError(XsakeError, ValueError):
    """A checkpoint that is corrupt, incomplete or cannot be written."""

    code = "XSK-601"
