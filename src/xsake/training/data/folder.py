"""Data folder before a build: its owner, completeness and cleanup."""

import re
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.model.tokenizer import TOKENIZER
from xsake.training.data.index import BUILD_LOG, INDEX, DataIndex, read_index, shard_path
from xsake.training.data.unfinished import BuildLog
from xsake.training.data.vocabulary import TOKENIZER_CONFIG

_NAMES = "|".join(re.escape(name) for name in (INDEX, BUILD_LOG, TOKENIZER, TOKENIZER_CONFIG))
_BUILD_FILES = rf"(?:{_NAMES}|(?:train|validation)-\d{{5,}}\.bin)"
_TEMPORARY = rf"\.{_BUILD_FILES}\.[a-z0-9_]{{8}}"  # of a killed process


def prepare(folder: Path, recipe: str, *, overwrite: bool) -> DataIndex | None:
    """Prepare a folder for a build; raise if it holds anything else.

    Args:
        folder: of the build.
        recipe: digest of the data to build.
        overwrite: discard an earlier build.

    Returns:
        The index if the build is already complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    index = _read_existing_index(folder, overwrite=overwrite)
    existing = BuildLog(folder).recipe if index is None else index.recipe
    is_build = existing is not None or (overwrite and shard_path(folder, "train", 0).exists())
    names = [path.name for path in folder.iterdir() if not re.fullmatch(_TEMPORARY, path.name)]
    if names and not is_build:
        raise ArgumentError(
            "the folder is not empty and holds other files than a build",
            got=f"{folder} has {ascii(min(names))[1:-1]}",
            expected="a new or empty folder, or an earlier build of the same data",
            fix="use another folder with -o, or --no-resume if it is a build without its index",
        )
    if existing not in (None, recipe) and not overwrite:
        raise ArgumentError(
            "the folder holds another build",
            got=f"{folder}: built from other texts, another tokenizer or other settings",
            fix="use another folder with -o, or replace the build with --no-resume",
        )
    if overwrite:
        _clear(folder)
        return None
    for path in folder.iterdir():
        if re.fullmatch(_TEMPORARY, path.name):
            path.unlink()
    return index


def _read_existing_index(folder: Path, *, overwrite: bool) -> DataIndex | None:
    """Return the index in a folder; None if missing, or unreadable and to be replaced."""
    if not (folder / INDEX).exists():
        return None
    try:
        return read_index(folder)
    except ArgumentError:
        if overwrite:
            return None
        raise


def _clear(folder: Path) -> None:
    """Remove all files of a build; the index first, so that a partial build is never read."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if re.fullmatch(rf"{_BUILD_FILES}|{_TEMPORARY}", path.name) and path.name != BUILD_LOG:
            path.unlink()
    (folder / BUILD_LOG).unlink(missing_ok=True)
