"""Cache of results, one line per trial, for resuming interrupted evaluations."""

from pathlib import Path

from pydantic import ValidationError

from xsake._io import JsonlLog
from xsake._schema import Frozen
from xsake.errors import ArgumentError
from xsake.evaluation.record import Seconds


class CachedResult(Frozen):
    """Result of one trial.

    Attributes:
        key: digest of everything that the result depends on.
        seconds: of the computation.
        sums: over the spans of the trial, by name of the score.
    """

    key: str
    seconds: Seconds
    sums: dict[str, list[float]]


class ResultCache:
    """Results by key, in memory and optionally in an append-only file.

    Incomplete lines of interrupted writes are ignored.

    Args:
        path: a .jsonl file; None: in memory.
        overwrite: delete existing results.
    """

    def __init__(self, path: Path | None = None, *, overwrite: bool = False):
        self._path = path
        self._log = None if path is None else JsonlLog(path)
        self._results: dict[str, CachedResult] = {}
        if path is None:
            return
        try:
            if overwrite:
                path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._results = _read_entries(path)
        except OSError as error:
            raise _write_error(path, error) from error

    def find(self, key: str) -> CachedResult | None:
        """Return the result of a key, or None."""
        return self._results.get(key)

    def add(self, entry: CachedResult) -> None:
        """Add a result; it is synced to disk when this returns."""
        self._results[entry.key] = entry
        if self._path is None or self._log is None:
            return
        try:
            self._log.append(entry.model_dump_json(), sync=True)
        except OSError as error:
            raise _write_error(self._path, error) from error


def _read_entries(path: Path) -> dict[str, CachedResult]:
    if not path.exists():
        return {}
    entries = {}
    for line in path.read_bytes().splitlines():
        try:
            entry = CachedResult.model_validate_json(line)
        except ValidationError:
            continue
        entries[entry.key] = entry
    return entries


def _write_error(path: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        "cannot write the results",
        got=f"{path}: {error.strerror}",
        expected="a writable folder",
        fix="choose another path with -o",
    )
