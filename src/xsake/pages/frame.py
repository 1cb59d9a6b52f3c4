"""Template of a page that needs no network, no script and no other file."""

from collections.abc import Mapping

from xsake.pages.markup import Markup, element
from xsake.pages.style import STYLE

# Content Security Policy: no scripts, no network; images are data URLs.
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
    " form-action 'none'"
)


def render_page(title: str, sections: Mapping[str, Markup]) -> str:
    """Render a page with its title, links to its sections and the sections."""
    ids = {name: name.lower().replace(" ", "-") for name in sections}
    links = (element("li", element("a", name, href=f"#{id_}")) for name, id_ in ids.items())
    parts = (
        element("section", element("h2", name, id=ids[name]), part)
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
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *parts),
    )
    return "<!doctype html>\n" + element("html", head, "\n", body, lang="en") + "\n"
