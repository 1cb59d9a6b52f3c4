"""Elements of HTML and SVG as text: whatever is not an element itself is escaped."""

import html
from collections.abc import Iterable

_EMPTY = frozenset({"circle", "line", "path", "polyline", "rect"})  # of SVG: they may close at once
_VOID = frozenset({"meta"})


class Markup(str):
    """Text that `element` or `joined` made: it is not escaped again."""

    __slots__ = ()


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """An element of a page.

    Args:
        tag: its name.
        content: elements, and anything else as escaped text.
        attributes: by name, `_` for `-` and a last `_` for nothing; None leaves one out.

    Example:
        >>> element("p", "1 < 2 ", element("b", "&"), class_="note", aria_label='"')
        '<p class="note" aria-label="&quot;">1 &lt; 2 <b>&amp;</b></p>'
    """
    named = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{html.escape(_told(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{named}>")
    if tag in _EMPTY and not content:
        return Markup(f"<{tag}{named}/>")
    return Markup(f"<{tag}{named}>{joined(content)}</{tag}>")


def joined(parts: Iterable[object], between: str = "") -> Markup:
    """Several parts in a row.

    Args:
        parts: elements, and anything else as escaped text.
        between: them, escaped as well.
    """
    texts = (part if isinstance(part, Markup) else html.escape(_told(part)) for part in parts)
    return Markup(html.escape(between).join(texts))


def table(caption: object, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Markup:
    """A table that scrolls by itself where the screen is narrow; rows begin with their name."""
    head = element("tr", *(element("th", name, scope="col") for name in columns))
    body = (
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    )
    whole = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *body),
    )
    return scrolled(whole, f"table: {caption}")


def scrolled(content: Markup, label: str) -> Markup:
    """A part that may be wider than the screen; the keyboard reaches it and scrolls it."""
    return element("div", content, class_="wide", role="region", tabindex=0, aria_label=label)


def _told(value: object) -> str:
    """Numbers in few digits, anything else as it is."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
