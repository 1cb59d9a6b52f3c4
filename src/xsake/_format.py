"""Quantities as text."""


def format_seconds(seconds: float) -> str:
    """Three digits and the unit that suits: `1.23 ms`.

    Example:
        >>> format_seconds(0.00123)
        '1.23 ms'
    """
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def format_bytes(count: int) -> str:
    """Decimal megabytes: `12.9 MB`.

    Example:
        >>> format_bytes(12_900_000)
        '12.9 MB'
    """
    return f"{count / 1e6:,.1f} MB"


def format_commit(commit: str | None, is_dirty: bool | None) -> str:
    """First digits of a commit, with `+` for uncommitted changes.

    Example:
        >>> format_commit("0123456789abcdef", True), format_commit(None, None)
        ('0123456789+', 'no commit')
    """
    return "no commit" if commit is None else commit[:10] + ("+" if is_dirty else "")
