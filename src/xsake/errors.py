"""The errors XSAKE raises: what is wrong, what it got, what was expected and how to fix it."""


class XsakeError(Exception):
    """Base of every error raised on purpose; `code` is stable and has an entry in the docs.

    Args:
        what: one sentence on what is wrong.
        got: the offending value, printed as it is.
        expected: what would have been accepted.
        fix: what the caller can do about it.

    Attributes:
        is_transient: the same command may succeed the next time; commands end with 1, not 2.
    """

    code = "XSK-000"
    is_transient = False

    def __init__(self, what: str, *, got: object = None, expected: object = None, fix: str = ""):
        self.what, self.got, self.expected, self.fix = what, got, expected, fix
        parts = [f"{self.code}: {what}"]
        if got is not None:
            parts.append(f"  got:      {got}")
        if expected is not None:
            parts.append(f"  expected: {expected}")
        if fix:
            parts.append(f"  fix:      {fix}")
        super().__init__("\n".join(parts))


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
