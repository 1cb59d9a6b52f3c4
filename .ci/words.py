"""Counts what the language rule limits: forbidden words, participle functions, double class names.

    python .ci/words.py            totals, and the first places of each
    python .ci/words.py --all      every place
    python .ci/words.py --check    exit code 1 if a limit is exceeded

Quotations of files, logs and results are not text of the project and are left out.
"""

import argparse
import ast
import collections
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
FORBIDDEN = (
    r"told", r"tells?", r"teller", r"foretold", r"nobody", r"whoever", r"somebody", r"so many",
    r"is no(?= (?!longer\b))", r"goes on", r"of its own accord", r"beside", r"at hand",
    r"is thought to", r"wanted",
)  # fmt: skip
WORDS = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(FORBIDDEN)})(?![A-Za-z])", re.IGNORECASE)
PARTICIPLE = re.compile(
    r"_?(?:[a-z0-9]+_)*[a-z]{2,}(?:ed|told|kept|drawn|taken|given|chosen|known)"
)
NOT_PARTICIPLES = {"seed", "need", "feed", "speed", "exceed", "embed", "shared", "hundred", "red"}
LIMITS = {
    "words": 0, "found": 30, "participles": 30, "class twice in a package": 0, "class twice": 10,
}  # fmt: skip
TEXTS = (
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "ARCHITECTURE.md", "docs/*.md",
    "benchmarks/README.md", "showcase/app/**/*.ts*", "showcase/components/**/*.ts*",
    "showcase/lib/**/*.ts*", "src/xsake/server/page/*",
)  # fmt: skip
HISTORY = {"CHANGELOG.md", "docs/log.md"}  # entries of earlier versions stay as they were written
FORMATS = {
    ("src/xsake/observability/goodput.py", "goes on")
}  # spelling in files of earlier versions

Place = tuple[str, int, str]


def sources() -> dict[str, str]:
    """Texts of the package by path."""
    files = sorted((ROOT / "src").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}


def pages() -> dict[str, str]:
    """Texts that people read by path."""
    files = sorted(path for pattern in TEXTS for path in ROOT.glob(pattern) if path.is_file())
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    return {name: text for name, text in texts.items() if name not in HISTORY}


def count_words(texts: dict[str, str]) -> Iterator[Place]:
    """Yield forbidden words."""
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), start=1):
            for match in WORDS.finditer(line.replace("_", " ")):
                word = match.group().lower()
                if (name, word) not in FORMATS:
                    yield name, number, word


def count_names(trees: dict[str, ast.Module], identifier: str) -> Iterator[Place]:
    """Yield uses of an identifier."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.arg | ast.Attribute):
                used = getattr(node, "id", getattr(node, "arg", getattr(node, "attr", "")))
                if used == identifier:
                    yield name, node.lineno, used


def count_participles(trees: dict[str, ast.Module]) -> Iterator[Place]:
    """Yield functions whose name ends in a participle; properties and tests of state are nouns."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith(("is_", "has_", "__")):
                continue
            decorators = {ast.unparse(each).split(".")[-1] for each in node.decorator_list}
            last = node.name.rsplit("_", 1)[-1]
            is_noun = last in NOT_PARTICIPLES or decorators & {"property", "cached_property"}
            if PARTICIPLE.fullmatch(node.name) and not is_noun:
                yield name, node.lineno, node.name


def count_classes(trees: dict[str, ast.Module]) -> tuple[list[Place], list[Place]]:
    """Return classes whose name is defined again in their package, and anywhere."""
    places: dict[str, list[Place]] = collections.defaultdict(list)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append((name, node.lineno, node.name))
    inside, anywhere = [], []
    for each in places.values():
        if len(each) > 1:
            anywhere.append(each[0])
            packages = collections.Counter(place[0].split("/")[2] for place in each)
            inside += [p for p in each[1:] if packages[p[0].split("/")[2]] > 1]
    return inside, anywhere


def count_all() -> dict[str, list[Place]]:
    """Return every place by limit."""
    texts = sources()
    trees = {name: ast.parse(text) for name, text in texts.items()}
    inside, anywhere = count_classes(trees)
    return {
        "words": list(count_words(texts | pages())),
        "found": list(count_names(trees, "found")),
        "participles": list(count_participles(trees)),
        "class twice in a package": inside,
        "class twice": anywhere,
    }


def main() -> int:
    """Print counts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="print every place")
    parser.add_argument("--check", action="store_true", help="fail if a limit is exceeded")
    given = parser.parse_args()
    counts = count_all()
    for what, places in counts.items():
        print(f"{what}: {len(places)} (limit {LIMITS[what]})")
        for name, number, text in places if given.all else places[:3]:
            print(f"  {name}:{number}: {text}")
    is_over = any(len(places) > LIMITS[what] for what, places in counts.items())
    return int(given.check and is_over)


if __name__ == "__main__":
    sys.exit(main())
