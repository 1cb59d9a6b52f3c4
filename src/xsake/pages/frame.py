"""The frame of a page that needs no network, no script and no other file."""

from collections.abc import Mapping

from xsake.pages.markup import Markup, element
from xsake.pages.style import STYLE

# Not even a browser that is tricked may fetch or run anything; pictures are inside the page.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
    " form-action 'none'"
)


def framed(title: str, sections: Mapping[str, Markup]) -> str:
    """The whole page: its title, links to its sections, and those.

    Args:
        title: of the page.
        sections: by their own titles, in order.
    """
    places = {name: name.lower().replace(" ", "-") for name in sections}
    links = (element("li", element("a", name, href=f"#{at}")) for name, at in places.items())
    parts = (
        element("section", element("h2", name, id=places[name]), part)
        for name, part in sections.items()
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", Markup(STYLE)),
    )
    body = element(
        "body",
        element("h1", title),
        element("nav", element("ul", *links), aria_label="parts of this page"),
        element("main", *parts),
    )
    return "<!doctype html>\n" + element("html", head, "\n", body, lang="en") + "\n"
