"""Write the source tree of docs/tree.md from the first sentence of each module.

Run it to update the page; a test compares.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tree.md"
BLOCK = re.compile(r"(?<=<!-- tree -->\n```text\n).*?(?=```)", re.DOTALL)
INDENT, WIDTH = "  ", 30


def first_sentence(module: pathlib.Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?: |$)", paragraph)[0]


def draw_tree(folder: pathlib.Path, depth: int = 0) -> list[str]:
    label = f"{INDENT * depth}{folder.relative_to(ROOT) if not depth else folder.name}/"
    lines = [f"{label:{WIDTH}} {first_sentence(folder / '__init__.py')}"]
    for module in sorted(folder.glob("*.py")):
        if not module.name.startswith("__"):
            lines.append(f"{INDENT * (depth + 1) + module.name:{WIDTH}} {first_sentence(module)}")
    for package in sorted(init.parent for init in folder.glob("*/__init__.py")):
        lines += draw_tree(package, depth + 1)
    return lines


def update_page(page: str) -> str:
    """Return the page with the current tree."""
    lines = draw_tree(ROOT / "src" / "xsake") + draw_tree(ROOT / "benchmarks")
    return BLOCK.sub(lambda _: "\n".join(lines) + "\n", page)


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text()))
