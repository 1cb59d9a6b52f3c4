"""Scan folders for runs and documents, and assign opaque ids.

Requests use these ids; no path is built from request data. Symbolic links are not followed.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from xsake.server.tail import open_regular

ArtifactType = Literal["run", "plan", "rows", "certificate"]
_DEPTH = 4  # levels below the given folders
MAX_ARTIFACTS = 4096  # per type
MAX_ENTRIES = 500_000  # directory entries per scan
_IGNORED = frozenset({"steps", "profiles", "profile", "trackers", "metrics.index", "node_modules"})


@dataclass(frozen=True)
class Artifact:
    """A run or a document.

    Args:
        id: used in requests.
        type: run, plan, rows or certificate.
        name: display name.
        path: of a run's folder, or a document's file; never exposed.
    """

    id: str
    type: ArtifactType
    name: str
    path: Path


@dataclass(frozen=True)
class ScanResult:
    """Result of a scan.

    Args:
        artifacts: by type and id, at most `MAX_ARTIFACTS` per type.
        num_omitted: artifacts beyond that number, by type.
        is_truncated: whether the scan ended after `MAX_ENTRIES` files and folders.
    """

    artifacts: dict[ArtifactType, dict[str, Artifact]]
    num_omitted: dict[ArtifactType, int]
    is_truncated: bool


def scan(folders: tuple[Path, ...]) -> ScanResult:
    """Find the runs and documents in some folders.

    Args:
        folders: existing folders.
    """
    artifacts: dict[ArtifactType, dict[str, Artifact]] = {
        "run": {}, "plan": {}, "rows": {}, "certificate": {},
    }  # fmt: skip
    num_omitted: dict[ArtifactType, int] = dict.fromkeys(artifacts, 0)
    budget = iter(range(MAX_ENTRIES))
    for root in folders:
        for folder, files in _walk(root.resolve(), _DEPTH, budget):
            for type, name, path in _match_artifacts(folder, files):
                artifact = Artifact(_artifact_id(type, path), type, _decode_name(name), path)
                if len(artifacts[type]) < MAX_ARTIFACTS:
                    artifacts[type].setdefault(artifact.id, artifact)
                elif artifact.id not in artifacts[type]:
                    num_omitted[type] += 1
    return ScanResult(artifacts, num_omitted, next(budget, None) is None)


def _match_artifacts(folder: Path, files: set[str]) -> Iterator[tuple[ArtifactType, str, Path]]:
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


def _walk(folder: Path, depth: int, budget: Iterator[int]) -> Iterator[tuple[Path, set[str]]]:
    """Yield folders with their file names; every entry consumes one unit of the budget."""
    files: set[str] = set()
    folders: list[Path] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if next(budget, None) is None:
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
            if inner.name not in _IGNORED:
                yield from _walk(inner, depth - 1, budget)


def _artifact_id(type: ArtifactType, path: Path) -> str:
    return hashlib.blake2b(os.fsencode(f"{type}:{path}"), digest_size=8).hexdigest()


def _decode_name(name: str) -> str:
    """Decode a file name; invalid UTF-8 becomes replacement characters."""
    return os.fsencode(name).decode("utf-8", "replace")


def read_document(path: Path, max_bytes: int) -> bytes:
    """Read a regular file; raise OSError for links and larger files."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(27, "File too large")
    return data
