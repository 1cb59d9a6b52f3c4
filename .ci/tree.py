"""Draws the source tree for ARCHITECTURE.md from the modules' own first sentences.

Run it to bring the file up to date; a test compares.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "ARCHITECTURE.md"
BLOCK = re.compile(r"(?<=<!-- tree -->\n```text\n).*?(?=```)", re.DOTALL)
INDENT, WIDTH = "  ", 30


def first_sentence(module: pathlib.Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[^.])\.(?: |$)", paragraph)[0]


def lines(folder: pathlib.Path, depth: int = 0) -> list[str]:
    label = f"{INDENT * depth}{folder.relative_to(ROOT) if not depth else folder.name}/"
    found = [f"{label:{WIDTH}} {first_sentence(folder / '__init__.py')}"]
    for module in sorted(folder.glob("*.py")):
        if not module.name.startswith("__"):
            found.append(f"{INDENT * (depth + 1) + module.name:{WIDTH}} {first_sentence(module)}")
    for package in sorted(init.parent for init in folder.glob("*/__init__.py")):
        found += lines(package, depth + 1)
    return found


def updated(page: str) -> str:
    """The page with its tree as it should be."""
    drawn = "\n".join(lines(ROOT / "src" / "xsake") + lines(ROOT / "benchmarks")) + "\n"
    return BLOCK.sub(lambda _: drawn, page)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
