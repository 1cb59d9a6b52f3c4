"""HTML pages from Jinja2 templates: one file, no script, no network, everything escaped."""

import functools
import math
import re
from typing import Any

from xsake.errors import MissingExtraError
from xsake.reports.plots import DARK, LIGHT

# Content Security Policy: no scripts, no network.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render(template: str, *, extra: str, **values: Any) -> str:
    """Render a template of this package; text in `values` is escaped."""
    page = _templates(extra).get_template(template)
    return page.render(values, light=LIGHT, dark=DARK, policy=POLICY)


@functools.cache
def _templates(extra: str) -> Any:
    try:
        import jinja2
    except ImportError as error:
        fix = f"pip install 'xsake[{extra}]'"
        raise MissingExtraError("jinja2", "reports need Jinja2", fix=fix) from error
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("xsake.reports"), autoescape=True, trim_blocks=True,
        lstrip_blocks=True, undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    number = lambda value: f"{value:.6g}" if isinstance(value, float) else value
    filters = {"exp": math.exp, "number": number, "percent": "{:.1%}".format, "slug": _slug}
    templates.filters |= filters
    return templates


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
