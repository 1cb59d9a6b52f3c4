"""HTML and SVG elements as text; everything else is escaped."""

import html
from collections.abc import Iterable

_EMPTY = frozenset({"circle", "line", "path", "polyline", "rect"})  # self-closing in SVG
_VOID = frozenset({"meta"})


class Markup(str):
    """Text from `element` or `join`, which is not escaped again."""

    __slots__ = ()


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """Build an element.

    Args:
        tag: name of the element.
        content: elements; anything else becomes escaped text.
        attributes: by name; `_` stands for `-`, a trailing `_` is removed, None is omitted.

    Example:
        >>> element("p", "1 < 2 ", element("b", "&"), class_="note", aria_label='"')
        '<p class="note" aria-label="&quot;">1 &lt; 2 <b>&amp;</b></p>'
    """
    named = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{html.escape(_format_value(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{named}>")
    if tag in _EMPTY and not content:
        return Markup(f"<{tag}{named}/>")
    return Markup(f"<{tag}{named}>{join(content)}</{tag}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Concatenate parts.

    Args:
        parts: elements; anything else becomes escaped text.
        between: separator, escaped as well.
    """
    texts = (
        part if isinstance(part, Markup) else html.escape(_format_value(part)) for part in parts
    )
    return Markup(html.escape(between).join(texts))


def table(caption: object, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Markup:
    """Build a table that scrolls on narrow screens; the first cell of a row is its header."""
    head = element("tr", *(element("th", name, scope="col") for name in columns))
    body = (
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in rest))
        for first, *rest in rows
    )
    content = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *body),
    )
    return scroll_region(content, f"table: {caption}")


def scroll_region(content: Markup, label: str) -> Markup:
    """Wrap wide content in a region that scrolls, also by keyboard."""
    return element("div", content, class_="wide", role="region", tabindex=0, aria_label=label)


def _format_value(value: object) -> str:
    """Format floats with at most two decimals, anything else with `str`."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
