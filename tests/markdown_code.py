"""Finds the code in our Markdown pages; run with a page's path, it prints that page's Python."""

import pathlib
import re
import sys


def code_blocks(page: pathlib.Path, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


if __name__ == "__main__":
    print("\n".join(code_blocks(pathlib.Path(sys.argv[1]), "python")))
