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
