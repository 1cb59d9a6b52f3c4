"""Tables that are made of results, between two marks of a page that people write."""

import re

from xsake.errors import ArgumentError


def filled(text: str, tables: dict[str, str]) -> str:
    """A page with the tables between their marks, whatever was there.

    Args:
        text: of the page.
        tables: by the name of their mark.

    Example:
        >>> filled("<!-- a -->\\nold\\n<!-- /a -->", {"a": "new\\n"})
        '<!-- a -->\\nnew\\n<!-- /a -->'
    """
    for name, table in tables.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not marks.search(text):
            raise ArgumentError(
                "page-marker", "the page has no place for a table", expected=f"<!-- {name} -->"
            )
        text = marks.sub(lambda found, table=table: found[1] + table + found[2], text)
    return text
