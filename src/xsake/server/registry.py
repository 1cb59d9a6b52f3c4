"""What there is to see, under names that say nothing of where it lies.

Requests name things by ids that were given out here; no path is ever made of what a request says.
Links are not followed.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["run", "plan", "rows", "certificate"]
_DEPTH = 4  # folders below the ones that were named
_MOST = 512  # things of a kind
_MOST_ENTRIES = 20_000  # of folders, in one look
_SKIPPED = frozenset({"steps", "profiles", "profile", "trackers", "metrics.index", "node_modules"})
MOST_BYTES = 2**25  # of a document


@dataclass(frozen=True)
class Thing:
    """Something to see.

    Args:
        id: by which requests name it.
        kind: what it is.
        name: for people.
        path: of a run's folder, or a document's file; never told.
    """

    id: str
    kind: Kind
    name: str
    path: Path


def look(folders: tuple[Path, ...]) -> dict[Kind, dict[str, Thing]]:
    """Everything that is in some folders now, by kind and id.

    Args:
        folders: that exist.
    """
    found: dict[Kind, dict[str, Thing]] = {"run": {}, "plan": {}, "rows": {}, "certificate": {}}
    tickets = iter(range(_MOST_ENTRIES))
    for root in folders:
        for folder, files in _walk(root.resolve(), _DEPTH, tickets):
            for kind, name, path in _things(folder, files):
                thing = Thing(_id(kind, path), kind, name, path)
                if len(found[kind]) < _MOST:
                    found[kind].setdefault(thing.id, thing)
    return found


def _things(folder: Path, files: set[str]) -> Iterator[tuple[Kind, str, Path]]:
    if "metrics.jsonl" in files:
        yield "run", folder.name, folder
        return
    for name in sorted(files):
        path = folder / name
        stem, _, ending = name.partition(".")
        if ending == "jsonl":
            yield "rows", stem, path
        elif ending == "plan.json" or (ending == "json" and stem.startswith("plan")):
            yield "plan", stem, path
        elif ending == "json" and folder.name == "certificates":
            yield "certificate", stem, path


def _walk(folder: Path, depth: int, tickets: Iterator[int]) -> Iterator[tuple[Path, set[str]]]:
    """A folder and those below it; every entry takes a ticket, and without one nobody looks on."""
    files: set[str] = set()
    folders: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if next(tickets, None) is None:
                    break
                if entry.is_file(follow_symlinks=False):
                    files.add(entry.name)
                elif entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                    folders.append(folder / entry.name)
    except OSError:
        return
    yield folder, files
    if depth and "metrics.jsonl" not in files:
        for inner in sorted(folders):
            if inner.name not in _SKIPPED:
                yield from _walk(inner, depth - 1, tickets)


def _id(kind: Kind, path: Path) -> str:
    return hashlib.blake2b(f"{kind}:{path}".encode(), digest_size=8).hexdigest()


def read_document(path: Path, most: int = MOST_BYTES) -> bytes:
    """A whole file that is no link and not too large; raises OSError otherwise."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(27, "File too large")
    return data
