"""What a browser would find in a page, and what holds for every page."""

import html.parser


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and the words directly inside each tag."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.words: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and data.strip():
            self.words.setdefault(self._open[-1], []).append(data)

    def all(self, tag: str, **attributes: str) -> list[dict]:
        return [
            found
            for name, found in self.elements
            if name == tag and attributes.items() <= found.items()
        ]


def parse(text: str) -> Page:
    """The page, which needs nothing else and which everybody can read."""
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    attributes = [(name, value) for _, found in page.elements for name, value in found.items()]
    assert not [name for name, _ in attributes if name == "src" or name.startswith("on")]
    style = "".join(page.words["style"])
    assert "url(" not in style and "@import" not in style and "://" not in text
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert page.all("html", lang="en") and page.all("meta", name="viewport")
    assert "prefers-color-scheme: dark" in style
    assert len(page.all("caption")) == len(page.all("table")) > 0
    assert len(page.all("summary")) == len(page.all("details"))
    regions = page.all("div", role="region")
    assert regions and all(x["tabindex"] == "0" and x["aria-label"] for x in regions)
    ids = [value for name, value in attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    links = {value for name, value in attributes if name == "href"}
    assert links <= {f"#{place}" for place in ids}
    return page
