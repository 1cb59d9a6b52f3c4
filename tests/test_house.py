"""The promises of the repository itself: a light import, one version, readable sizes."""

import ast
import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import sys
import tomllib

import xsake
import xsake.errors

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_POSITIONAL = 600, 60, 8

LIGHT_IMPORT = """
import sys
import xsake
import xsake.errors

heavy = {"equinox", "fastapi", "flax", "matplotlib", "optax", "orbax", "torch", "typer"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()

from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "importing xsake touched a device"
"""


def test_import_is_light_and_touches_no_device():
    command = [sys.executable, "-W", "error", "-c", LIGHT_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_distributions_have_one_version():
    native = tomllib.loads((ROOT / "native" / "pyproject.toml").read_text())
    assert native["project"]["version"] == xsake.__version__


def test_the_installed_version_is_the_one_in_the_source():
    assert importlib.metadata.version("xsake") == xsake.__version__


def test_the_changelog_names_this_version():
    assert f"## [{xsake.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_exists():
    missing = [name for name in xsake.__all__ if not hasattr(xsake, name)]
    assert not missing


def test_files_and_functions_stay_readable():
    faults = []
    for path in SOURCES:
        text, name = path.read_text(), path.relative_to(ROOT)
        if len(text.splitlines()) > MAX_FILE_LINES:
            faults.append(f"{name} has more than {MAX_FILE_LINES} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef):
                continue
            docstring = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno + 1 - len(docstring.splitlines())
            if lines > MAX_FUNCTION_LINES:
                faults.append(f"{name}: {node.name} has {lines} lines")
            # Kernel refs aside; keyword-only parameters and defaults need no counting.
            positional = [arg for arg in node.args.args if not arg.arg.endswith("_ref")]
            if len(positional) - len(node.args.defaults) > MAX_POSITIONAL:
                faults.append(f"{name}: {node.name} takes too many parameters")
    assert not faults, "\n".join(faults)


def test_every_condition_has_its_own_error_slug():
    slugs, faults = set(), []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            error = getattr(xsake.errors, getattr(getattr(node, "func", None), "id", ""), None)
            if not hasattr(error, "code") or not isinstance(node.args[0], ast.Constant):
                continue  # another call, or the slug is a variable
            slug = node.args[0].value
            if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) or (error.code, slug) in slugs:
                faults.append(f"{path.relative_to(ROOT)}:{node.lineno}: {error.code}.{slug}")
            slugs.add((error.code, slug))
    assert not faults, "\n".join(faults)


def test_the_source_tree_page_is_current():
    spec = importlib.util.spec_from_file_location("tree", ROOT / ".ci" / "tree.py")
    tree = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tree)
    page = tree.PAGE.read_text()
    assert page == tree.update_page(page), "run `just tree`"


def test_every_error_code_is_explained():
    page = (ROOT / "docs" / "errors.md").read_text()
    raised = [value for value in vars(xsake.errors).values() if isinstance(value, type)]
    assert all(f"| {error.code} | `{error.__name__}` |" in page for error in raised)
