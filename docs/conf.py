from sphinx.util import logging

import xsake
import xsake.masks

project = "XSAKE"
author = "The XSAKE authors"
copyright = author
release = version = xsake.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build"]
nitpicky = False
default_role = "code"  # `x` in a docstring means the same as in Markdown
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # an override without words of its own is not listed again
autodoc_typehints = "signature"
autoclass_content = "class"
myst_enable_extensions = ["deflist", "dollarmath", "colon_fence"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

html_theme = "sphinx_book_theme"
html_title = "XSAKE"
html_show_sphinx = False
html_theme_options = {"show_toc_level": 2}
if tags.has("released"):  # `sphinx-build -t released`: other versions lie beside it
    html_theme_options |= {
        "switcher": {"json_url": "../switcher.json", "version_match": f"v{release}"},
        "check_switcher": False,
        "article_header_start": ["toggle-primary-sidebar.html", "version-switcher.html"],
    }


def warn_about_undocumented_names(app, env):
    """A public name without an entry in the reference is a warning, and so fails the build."""
    documented = {entry.rpartition(".")[2] for entry in env.get_domain("py").objects}
    for module in (xsake, xsake.masks):
        for name in set(module.__all__) - documented:
            logging.getLogger(__name__).warning("%s.%s is undocumented", module.__name__, name)


def setup(app):
    app.connect("env-check-consistency", warn_about_undocumented_names)
