"""A folder before data is built in it: whose it is, what is complete, and what may be removed."""

import re
from pathlib import Path

from xsake.errors import ArgumentError
from xsake.model.tokenizer import TOKENIZER
from xsake.training.data.index import INDEX, UNFINISHED, Index, read_index, shard_path
from xsake.training.data.unfinished import Unfinished
from xsake.training.data.vocabulary import SETTINGS

_NAMES = "|".join(re.escape(name) for name in (INDEX, UNFINISHED, TOKENIZER, SETTINGS))
_OURS = rf"(?:{_NAMES}|(?:train|validation)-\d{{5,}}\.bin)"
_LEFT_OVER = rf"\.{_OURS}\.[a-z0-9_]{{8}}"  # of a process that was killed while it wrote


def prepare(folder: Path, recipe: str, *, fresh: bool) -> Index | None:
    """Make room for a build, or refuse to.

    Args:
        folder: that data is to be built in.
        recipe: names what is to be built.
        fresh: forget what an earlier build has left.

    Returns:
        The index if all of this is built already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _found(folder, fresh=fresh)
    there = Unfinished(folder).recipe if found is None else found.recipe
    is_ours = there is not None or (fresh and shard_path(folder, "train", 0).exists())
    names = [path.name for path in folder.iterdir() if not re.fullmatch(_LEFT_OVER, path.name)]
    if names and not is_ours:
        raise ArgumentError(
            "the folder is not empty, and what is in it was not built by this command",
            got=f"{folder} has {ascii(min(names))[1:-1]}",
            expected="a new or empty folder, or an earlier build of the same data",
            fix="name another folder with -o, or give --fresh if it is a build that lost its index",
        )
    if there not in (None, recipe) and not fresh:
        raise ArgumentError(
            "the folder holds other data",
            got=f"{folder}: built from other texts, another tokenizer or other settings",
            fix="name another folder with -o, or replace what is there with --fresh",
        )
    if fresh:
        _clear(folder)
        return None
    for path in folder.iterdir():
        if re.fullmatch(_LEFT_OVER, path.name):
            path.unlink()
    return found


def _found(folder: Path, *, fresh: bool) -> Index | None:
    """The index that is there; one that cannot be read is none if it is to be replaced."""
    if not (folder / INDEX).exists():
        return None
    try:
        return read_index(folder)
    except ArgumentError:
        if fresh:
            return None
        raise


def _clear(folder: Path) -> None:
    """Remove what builds write; the index first, so that nobody reads what is half gone."""
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if re.fullmatch(rf"{_OURS}|{_LEFT_OVER}", path.name) and path.name != UNFINISHED:
            path.unlink()
    (folder / UNFINISHED).unlink(missing_ok=True)
