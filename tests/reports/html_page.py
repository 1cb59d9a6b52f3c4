"""What holds for every page."""

import re
from xml.etree import ElementTree

# Browsers replace these characters, XML has none of them.
CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")


def parse(text: str) -> ElementTree.Element:
    """The page, which is well-formed, needs nothing else, and can be read by everybody."""
    page = ElementTree.fromstring(CONTROLS.sub("", text))
    tags = {element.tag for element in page.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    attributes = [pair for element in page.iter() for pair in element.items()]
    assert not [name for name, _ in attributes if name == "src" or name.startswith("on")]
    style = page.findtext("head/style")
    assert "url(" not in style and "@import" not in style and "://" not in text
    (policy,) = page.findall("head/meta[@http-equiv='Content-Security-Policy']")
    assert policy.get("content").startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert page.get("lang") == "en" and page.findall("head/meta[@name='viewport']")
    assert "prefers-color-scheme: dark" in style
    assert len(page.findall(".//table/caption")) == len(page.findall(".//table")) > 0
    assert len(page.findall(".//details/summary")) == len(page.findall(".//details"))
    regions = page.findall(".//div[@role='region']")
    assert regions and all(x.get("tabindex") == "0" and x.get("aria-label") for x in regions)
    ids = [value for name, value in attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    assert {value for name, value in attributes if name == "href"} <= {f"#{x}" for x in ids}
    return page


def words(page: ElementTree.Element, tag: str) -> list[str]:
    """The text of every element with this tag."""
    return ["".join(element.itertext()) for element in page.iter(tag)]
