"""An index beside a run's metrics: a million steps are drawn without being read again.

`metrics.jsonl` stays the truth. The index has, for every 64 and every 1024 steps, the least, the
most and the mean of each series, and where the lines stand; it grows with the file, is made again
when the file is another one, and may be deleted at any time.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from xsake.bench.whole_file import write_whole
from xsake.observability.metrics_file import parsed
from xsake.server.buckets import Buckets, merged, summed_up
from xsake.server.columns import Columns
from xsake.server.tail import identity, whole_lines

FINE, COARSE = 64, 1024  # steps of a bucket
_VERSION = 1
_MOST_RAW = 2048  # steps that are read from the file itself


@dataclass(frozen=True)
class View:
    """Some series, as many points as a screen has.

    Args:
        steps: of every point, the first one that it stands for.
        resolution: steps that a point stands for at least; 1: the numbers themselves.
        least: by series, as are most and mean; NaN where nothing was told.
        most: the highest.
        mean: over the lines that told something.
    """

    steps: Int[np.ndarray, " N"]
    resolution: int
    least: Float[np.ndarray, "N C"]
    most: Float[np.ndarray, "N C"]
    mean: Float[np.ndarray, "N C"]


class Index:
    """The index of one run; one thread feeds it.

    Args:
        source: the run's metrics.jsonl.
        folder: for its files, made if it is not there.
    """

    def __init__(self, source: Path, folder: Path):
        self._source, self._folder = source, folder
        folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._identity = identity(self._source)
        about = self._read_about()
        if about is None:
            shutil.rmtree(self._folder)
            self._folder.mkdir()
            about = {"names": [], "began": []}
        self.columns = Columns(about["names"])
        # (place of the words, first step that is done again): earlier lines of it do not count.
        self._began: list[tuple[int, int]] = [(place, step) for place, step in about["began"]]
        self._fine, self._coarse = Buckets(self._folder, "fine"), Buckets(self._folder, "coarse")
        self._start_again(len(self._fine) - 1)
        self._write_about()

    def _read_about(self) -> dict[str, Any] | None:
        try:
            about = json.loads((self._folder / "index.json").read_bytes())
            is_ours = about["version"] == _VERSION and about["identity"] == self._identity
            return about if is_ours else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_about(self) -> None:
        about = {"version": _VERSION, "identity": self._identity}
        about |= {"names": self.columns.names, "began": self._began}
        write_whole(self._folder / "index.json", json.dumps(about))
        self._named, self._told = len(self.columns.names), len(self._began)

    def _start_again(self, count: int) -> None:
        """Keep so many fine buckets; the lines of the next one are read again."""
        heads = self._fine.heads()
        place = int(heads[count, 2]) if 0 <= count < len(heads) else 0
        self._fine.keep(max(count, 0))
        whole = int((self._coarse.heads()[:, 1] <= self._last_step).sum()) if count > 0 else 0
        self._coarse.keep(whole)
        self._place, self._bucket = place, _Bucket()

    @property
    def _last_step(self) -> int:
        heads = self._fine.heads()
        return int(heads[-1, 1]) if len(heads) else -1

    @property
    def place(self) -> int:
        """Bytes of the file that have been read."""
        return self._place

    @property
    def last_step(self) -> int:
        """The highest step that is known; -1: none."""
        return max(self._last_step, self._bucket.last)

    def feed(self, most_lines: int = 4096) -> list[dict[str, Any]]:
        """Read on; the lines that were new, events included. Empty: nothing is left.

        Args:
            most_lines: after which it returns, so that others have their turn.
        """
        if self._is_another_file():
            self._open()
        found: list[dict[str, Any]] = []
        for count, (place, text) in enumerate(whole_lines(self._source, self._place), start=1):
            line = parsed(text)
            self._place = place + len(text) + 1
            if line is not None:
                found.append(line)
                if line.get("event") == "began" and self._goes_back(place, line["from_step"]):
                    break
                if "step" in line and self._counts(place, line["step"]):
                    self._take(place, line)
            if count >= most_lines:
                break
        return found

    def _is_another_file(self) -> bool:
        if self._source.stat().st_size < self._place:
            self._identity = ""
        return identity(self._source) != self._identity

    def _goes_back(self, place: int, step: int) -> bool:
        """Note where a life began; whether buckets had to be given up, to be made again."""
        if (place, step) in self._began:
            return False
        self._began.append((place, step))
        self._write_about()
        if self.last_step < step:
            return False
        heads = self._fine.heads()
        self._start_again(int((heads[:, 0] < step // COARSE * COARSE).sum()))
        return True

    def _counts(self, place: int, step: int) -> bool:
        return not any(place < began and step >= again for began, again in self._began)

    def _take(self, place: int, line: dict[str, Any]) -> None:
        step, bucket = line["step"], self._bucket
        if bucket.rows and step // FINE != bucket.first // FINE:
            self._close(step)
            bucket = self._bucket
        if not bucket.rows:
            bucket.first, bucket.place = step, place
        bucket.last = max(step, bucket.last)
        bucket.rows.append(self.columns.row(line))

    def _close(self, next_step: int) -> None:
        if len(self.columns.names) != self._named:
            self._write_about()  # names first: numbers without a name would be lost
        bucket, self._bucket = self._bucket, _Bucket()
        stats = bucket.stats(len(self.columns.names))
        self._fine.add(bucket.first, bucket.last, bucket.place, stats.astype(np.float32))
        if next_step // COARSE != bucket.first // COARSE:
            self._close_coarse(bucket.first // COARSE)

    def _close_coarse(self, number: int) -> None:
        heads = self._fine.heads()
        begin = int(np.searchsorted(heads[:, 0], number * COARSE))
        columns = np.arange(len(self.columns.names))
        stats = merged(self._fine.stats(columns, begin, len(heads)))
        first, _, place = heads[begin].tolist()
        self._coarse.add(first, int(heads[-1, 1]), place, stats.astype(np.float32))

    def view(self, names: Sequence[str], begin: int, end: int, points: int) -> View:
        """Some series between two steps.

        Args:
            names: of series; one that is not known has nothing to tell.
            begin: first step.
            end: after the last one.
            points: at most.
        """
        end = min(end, self.last_step + 1)
        columns = np.array([self._column(name) for name in names], np.int64)
        if end - begin <= min(points, _MOST_RAW):
            return self._raw(columns, begin, end)
        is_fine = (end - begin) // COARSE < points // 2
        level, size = (self._fine, FINE) if is_fine else (self._coarse, COARSE)
        heads = level.heads()
        first = int(np.searchsorted(heads[:, 1], begin))
        last = int(np.searchsorted(heads[:, 0], end))
        stats = level.stats(columns, first, last)
        steps = heads[first:last, 0]
        if not is_fine:  # what no coarse bucket has yet
            fine = self._fine.heads()
            start = int(np.searchsorted(fine[:, 0], heads[-1, 1] + 1 if len(heads) else 0))
            start = max(start, int(np.searchsorted(fine[:, 1], begin)))
            stop = int(np.searchsorted(fine[:, 0], end))
            stats = np.concatenate([stats, self._fine.stats(columns, start, stop)])
            steps = np.concatenate([steps, fine[start:stop, 0]])
        bucket = self._bucket
        if bucket.rows and bucket.first < end and bucket.last >= begin:
            whole = bucket.stats(max(len(self.columns.names), int(columns.max(initial=0)) + 1))
            stats = np.concatenate([stats, whole[None, :, columns].astype(np.float32)])
            steps = np.append(steps, bucket.first)
        return _reduced(steps, stats, points, size)

    def _column(self, name: str) -> int:
        place = self.columns.place(name)
        return len(self.columns.names) if place is None else place

    def _raw(self, columns: Int[np.ndarray, " C"], begin: int, end: int) -> View:
        heads = self._fine.heads()
        bucket = int(np.searchsorted(heads[:, 1], begin))
        place = int(heads[bucket, 2]) if bucket < len(heads) else self._bucket.place
        rows: dict[int, np.ndarray] = {}
        for where, text in whole_lines(self._source, place, self._place):
            line = parsed(text)
            if not line or "step" not in line or not self._counts(where, line["step"]):
                continue
            if line["step"] >= end:
                break
            if line["step"] < begin:
                continue
            row = rows.setdefault(line["step"], np.full(len(columns), np.nan))
            places, values = self.columns.row(line)
            for at, column in enumerate(columns):
                if len(hit := np.flatnonzero(places == column)):
                    row[at] = values[hit[0]]
        steps = np.array(sorted(rows), np.int64)
        told = np.array([rows[int(step)] for step in steps]).reshape(len(steps), len(columns))
        return View(steps, 1, told, told, told)

    def total(self, name: str) -> float:
        """The sum of all numbers of a series, such as how often an update was refused."""
        column = self.columns.place(name)
        if column is None:
            return 0.0
        stats = self._fine.stats(np.array([column]), 0, len(self._fine))
        told = stats[:, 3, 0] > 0
        sum_ = float((stats[told, 2, 0].astype(np.float64) * stats[told, 3, 0]).sum())
        if self._bucket.rows:
            whole = self._bucket.stats(len(self.columns.names))[:, column]
            sum_ += float(whole[2] * whole[3]) if whole[3] else 0.0
        return sum_


class _Bucket:
    """Lines of the newest steps, not on disk yet."""

    def __init__(self) -> None:
        self.first, self.last, self.place = 0, -1, 0
        self.rows: list[Any] = []

    def stats(self, series: int) -> Float[np.ndarray, "4 C"]:
        whole = np.full((len(self.rows), series), np.nan)
        for row, (columns, values) in zip(whole, self.rows, strict=True):
            row[columns] = values
        return summed_up(whole)


def _reduced(steps: np.ndarray, stats: np.ndarray, points: int, size: int) -> View:
    """At most so many points, neighbours merged."""
    group = max(1, -(-len(steps) // points))
    if group > 1:
        parts = range(0, len(steps), group)
        stats = np.array([merged(stats[i : i + group]) for i in parts])
        steps = steps[::group]
    return View(steps, size * group, stats[:, 0], stats[:, 1], stats[:, 2])


def index_folder(run: Path) -> Path:
    """Where the index of a run lies: beside its metrics if we may write there."""
    return run / "metrics.index"


@contextlib.contextmanager
def only_writer(folder: Path):
    """Whether nobody else feeds the index of this folder; holds it until the end of the body."""
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.with_name(f"{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)
