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

from xsake.server.tail import open_regular

Kind = Literal["run", "plan", "rows", "certificate"]
_DEPTH = 4  # folders below the ones that were named
MAX_THINGS = 4096  # of a kind
MAX_ENTRIES = 500_000  # of folders, in one search
_SKIPPED = frozenset({"steps", "profiles", "profile", "trackers", "metrics.index", "node_modules"})


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


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Args:
        things: by kind and id, at most `MAX_THINGS` of each kind.
        num_left_out: things beyond that number, by kind.
        is_cut: whether the search ended after `MAX_ENTRIES` files and folders.
    """

    things: dict[Kind, dict[str, Thing]]
    num_left_out: dict[Kind, int]
    is_cut: bool


def search(folders: tuple[Path, ...]) -> Found:
    """Find everything that is in some folders now.

    Args:
        folders: that exist.
    """
    things: dict[Kind, dict[str, Thing]] = {"run": {}, "plan": {}, "rows": {}, "certificate": {}}
    num_left_out: dict[Kind, int] = dict.fromkeys(things, 0)
    tickets = iter(range(MAX_ENTRIES))
    for root in folders:
        for folder, files in _walk(root.resolve(), _DEPTH, tickets):
            for kind, name, path in _things(folder, files):
                thing = Thing(_id(kind, path), kind, _readable_name(name), path)
                if len(things[kind]) < MAX_THINGS:
                    things[kind].setdefault(thing.id, thing)
                elif thing.id not in things[kind]:
                    num_left_out[kind] += 1
    return Found(things, num_left_out, next(tickets, None) is None)


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
    """A folder and those below it; every entry takes a ticket, and without one the search ends."""
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
    return hashlib.blake2b(os.fsencode(f"{kind}:{path}"), digest_size=8).hexdigest()


def _readable_name(name: str) -> str:
    """The name of a file as text; bytes that are not UTF-8 become replacement characters."""
    return os.fsencode(name).decode("utf-8", "replace")


def read_document(path: Path, most: int) -> bytes:
    """A whole file that is no link and not too large; raises OSError otherwise."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(27, "File too large")
    return data
