"""What has been measured so far, a line per trial, so that an interrupted run can go on."""

from pathlib import Path

from pydantic import ValidationError

from xsake._io import JsonlLog
from xsake._schema import Frozen
from xsake.errors import ArgumentError
from xsake.evaluation.record import Seconds


class Entry(Frozen):
    """The answer to one trial.

    Attributes:
        key: names everything that the answer depends on.
        seconds: that it took.
        sums: over the spans of the trial, by the name of the score.
    """

    key: str
    seconds: Seconds
    sums: dict[str, list[float]]


class Journal:
    """Answers by key, in memory and, if there is a path, in a file that only grows.

    A line that a dying process left unfinished is no entry, and is measured again.

    Args:
        path: a .jsonl file; None keeps nothing.
        fresh: forget what the file says.
    """

    def __init__(self, path: Path | None = None, *, fresh: bool = False):
        self._path = path
        self._log = None if path is None else JsonlLog(path)
        self._known: dict[str, Entry] = {}
        if path is None:
            return
        try:
            if fresh:
                path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._known = _entries(path)
        except OSError as error:
            raise _cannot_be_used(path, error) from error

    def find(self, key: str) -> Entry | None:
        """The answer under a key, if there is one."""
        return self._known.get(key)

    def add(self, entry: Entry) -> None:
        """Keep an answer; it is on the disk when this returns."""
        self._known[entry.key] = entry
        if self._path is None or self._log is None:
            return
        try:
            self._log.append(entry.model_dump_json(), sync=True)
        except OSError as error:
            raise _cannot_be_used(self._path, error) from error


def _entries(path: Path) -> dict[str, Entry]:
    if not path.exists():
        return {}
    found = {}
    for line in path.read_bytes().splitlines():
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError:
            continue
        found[entry.key] = entry
    return found


def _cannot_be_used(path: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        "the results cannot be kept",
        got=f"{path}: {error.strerror}",
        expected="a folder that can be written to",
        fix="name another place with -o",
    )
