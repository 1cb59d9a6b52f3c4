"""The versions whose pages lie beside each other, newest first, as the theme's switcher reads them.

python .ci/switcher.py v0.2.0      # all tags of the repository, and this one
"""

import json
import re
import subprocess
import sys

VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


def entries(tags: list[str]) -> list[dict]:
    """One entry for each released version.

    Example:
        >>> [x["version"] for x in entries(["v0.2.0", "v0.10.0", "try-out", "v0.2.0"])]
        ['v0.10.0', 'v0.2.0']
    """
    numbers = {tag: tuple(map(int, m.groups())) for tag in tags if (m := VERSION.fullmatch(tag))}
    newest_first = sorted(numbers, key=numbers.__getitem__, reverse=True)
    return [
        {"name": tag, "version": tag, "url": f"../{tag}/", "preferred": tag == newest_first[0]}
        for tag in newest_first
    ]


if __name__ == "__main__":
    tags = subprocess.check_output(["git", "tag", "--list", "v*"], text=True).split()
    print(json.dumps(entries([*tags, *sys.argv[1:]]), indent=2))
