"""The index of a run's metrics: a million steps are drawn without being read again.

`metrics.jsonl` stays the truth. The index has, for every 64 and every 1024 steps, the least, the
most and the mean of each series, and where the lines stand. It lies in the cache folder of the
server, grows with the file, is built again when the file is another one or the index is damaged,
and may be deleted at any time.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from xsake.observability.metrics import MOST_SERIES
from xsake.server.buckets import Buckets, DamagedIndexError, merged, summed_up
from xsake.server.columns import Columns
from xsake.server.lines import read_line
from xsake.server.restarts import Restarts
from xsake.server.tail import Tail, file_identity, open_regular, stat_regular

FINE, COARSE = 64, 1024  # steps of a bucket
_VERSION = 2
_MAX_ABOUT = 2**22  # bytes of index.json
_SKIPPED = "is_skipped"
_MAX_RAW = 2048  # steps that are read from the file itself


@dataclass(frozen=True)
class View:
    """Some series, as many points as a screen has.

    Args:
        steps: of every point, the first one that it stands for.
        resolution: steps that a point stands for at least; 1: the numbers themselves.
        least: by series, as are most and mean; NaN where there is no number.
        most: the highest.
        mean: over the lines that have a number.
    """

    steps: Int[np.ndarray, " N"]
    resolution: int
    least: Float[np.ndarray, "N C"]
    most: Float[np.ndarray, "N C"]
    mean: Float[np.ndarray, "N C"]


class Index:
    """The index of one run; one thread calls `feed`.

    Args:
        source: the run's metrics.jsonl.
        folder: for its files; made when there is something to keep.
    """

    def __init__(self, source: Path, folder: Path):
        self._source, self._folder = source, folder
        self.num_rebuilt, self.is_at_end = 0, False
        self._open()

    def _open(self) -> None:
        self._identity = file_identity(self._source)
        try:
            about = self._read_about()
            self._load(about)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, DamagedIndexError):
            if self._folder.exists():
                self.num_rebuilt += 1
                shutil.rmtree(self._folder)
            self._load({"names": [], "began": [], "counted": 0, "dropped": [0, 0]})

    def _read_about(self) -> dict[str, Any]:
        """What index.json says; raises one of the errors of `_open` unless it fits the source."""
        with open_regular(self._folder / "index.json") as file:
            text = file.read(_MAX_ABOUT + 1)
        if len(text) > _MAX_ABOUT:
            raise DamagedIndexError("index.json is too large")
        about = json.loads(text)
        if about["version"] != _VERSION or about["identity"] != self._identity:
            raise DamagedIndexError("the index of another file")
        names, began = about["names"], about["began"]
        is_sound = (
            isinstance(names, list) and len(set(names)) == len(names) <= MOST_SERIES
            and all(isinstance(name, str) and len(name) <= 64 for name in names)
            and all(_is_count(x) for x in (about["counted"], *about["dropped"]))
            and all(len(pair) == 2 and all(map(_is_count, pair)) for pair in began)
            and len(about["dropped"]) == 2
        )  # fmt: skip
        if not is_sound:
            raise DamagedIndexError("index.json")
        return about

    def _load(self, about: dict[str, Any]) -> None:
        self.columns = Columns(about["names"])
        self._restarts = Restarts([(place, step) for place, step in about["began"]])
        self._counted = about["counted"]
        self.dropped_lines, self.dropped_values = about["dropped"]
        self._fine, self._coarse = Buckets(self._folder, "fine"), Buckets(self._folder, "coarse")
        size = stat_regular(self._source).st_size
        if max(self._fine.last[2], self._coarse.last[2]) > size:
            raise DamagedIndexError("places beyond the end of the file")
        self._num_named, self._is_changed = len(self.columns.names), False
        self._is_inside_long = False
        self._skipped: float | None = None
        self._start_again(len(self._fine) - 1)

    def _write_about(self) -> None:
        about = {"version": _VERSION, "identity": self._identity, "counted": self._counted}
        about |= {"names": self.columns.names, "began": self._restarts.entries}
        about |= {"dropped": [self.dropped_lines, self.dropped_values]}
        self._folder.mkdir(mode=0o700, exist_ok=True)
        new = self._folder / "index.json.new"
        new.write_text(json.dumps(about))
        new.replace(self._folder / "index.json")
        self._num_named, self._is_changed = len(self.columns.names), False

    def close(self) -> None:
        """Write down what is not on disk yet."""
        if self._is_changed and self._folder.exists():
            self._write_about()

    def _start_again(self, count: int) -> None:
        """Keep the first `count` fine buckets; the lines of the next one are read again."""
        heads = self._fine.heads()
        place = int(heads[count, 2]) if 0 <= count < len(heads) else 0
        self._fine.keep(max(count, 0))
        self._coarse.keep(int((self._coarse.heads()[:, 1] <= self._fine.last[1]).sum()))
        self._place, self._bucket = place, _Bucket()
        self._is_inside_long, self._skipped = False, None

    @property
    def place(self) -> int:
        """Bytes of the file that have been read."""
        return self._place

    @property
    def last_step(self) -> int:
        """The highest step that is known; -1: none."""
        return max(self._fine.last[1], self._bucket.last)

    def feed(self, max_lines: int = 4096) -> list[dict[str, Any]]:
        """Read on; return the new lines, events included. `is_at_end` says whether more is there.

        Args:
            max_lines: after which it returns, so that other runs have their turn.
        """
        if self._is_another_file():
            self._open()
        found: list[dict[str, Any]] = []
        self.is_at_end = False
        with open_regular(self._source) as file:
            tail = Tail(file, self._place, is_inside_long=self._is_inside_long)
            for _ in range(max_lines):
                place = tail.place
                text = tail.next_line()
                if text is None:
                    self.is_at_end = True
                    break
                self._place, self._is_inside_long = tail.place, tail.is_inside_long
                is_new = place >= self._counted
                line = self._read(text, is_new)
                if line is not None:
                    if is_new:
                        found.append(line)
                    self._take(place, line, is_new)
                if self._place != tail.place:
                    tail.seek(self._place)
        return found

    def _is_another_file(self) -> bool:
        is_shorter = stat_regular(self._source).st_size < self._place
        return is_shorter or file_identity(self._source) != self._identity

    def _read(self, text: bytes, is_new: bool) -> dict[str, Any] | None:
        """Validate a line, and count what cannot be used of it."""
        line = read_line(text)
        if is_new:
            self._counted = self._place
            self._drop(int(line is None and bool(text.strip())), line.num_dropped if line else 0)
        return None if line is None else line.fields

    def _drop(self, num_lines: int, num_values: int) -> None:
        if num_lines or num_values:
            self.dropped_lines += num_lines
            self.dropped_values += num_values
            self._is_changed = True

    def _take(self, place: int, line: dict[str, Any], is_new: bool) -> None:
        """Use a line; `_place` is elsewhere afterwards if other lines have to be read next."""
        if line.get("event") == "began":
            if self._restarts.add(place, line["from_step"]):
                self._is_changed = True
                self._go_back(line["from_step"])
        elif "event" not in line:
            if not self._restarts.counts(place, line["step"]):
                self._place = self._restarts.next_place(place)
            elif self._is_in_order(line["step"]):
                self._add(place, line)
            elif is_new:
                self._drop(1, 0)

    def _go_back(self, step: int) -> None:
        """Give up a step and later ones; of its bucket, the lines before it are kept."""
        if self.last_step < step:
            return
        if self._bucket.rows and self._bucket.first // FINE == step // FINE:
            self._bucket.cut(step)
            return
        place, heads = self._place, self._fine.heads()
        count = int(np.searchsorted(heads[:, 0], step // FINE * FINE))
        is_cut = count < len(heads) and heads[count, 0] < step
        self._start_again(count)
        if not is_cut:
            self._place = place  # no line before the step belongs to its bucket

    def _is_in_order(self, step: int) -> bool:
        """Whether a step is not of an earlier bucket than the newest one."""
        if self._bucket.rows:
            return step // FINE >= self._bucket.first // FINE
        return step // FINE > self._fine.last[1] // FINE

    def _add(self, place: int, line: dict[str, Any]) -> None:
        step = line["step"]
        if self._bucket.rows and step // FINE != self._bucket.first // FINE:
            self._close(step)
        self._bucket.add(step, place, *self.columns.row(line))

    def _close(self, next_step: int) -> None:
        if self._is_changed or len(self.columns.names) != self._num_named:
            self._write_about()  # first: buckets need the names, and what no longer counts
        bucket, self._bucket = self._bucket, _Bucket()
        stats = bucket.stats(len(self.columns.names))
        self._fine.add(bucket.first, bucket.last, bucket.place, stats.astype(np.float32))
        if self._skipped is not None:
            self._skipped += _total(stats[None], self.columns.place(_SKIPPED))
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
        """Return some series between two steps.

        Args:
            names: of series; one that is not known has no numbers.
            begin: first step.
            end: after the last one.
            points: at most.
        """
        end = min(end, self.last_step + 1)
        columns = np.array([self._column(name) for name in names], np.int64)
        if end - begin <= min(points, _MAX_RAW):
            return self._view_lines(columns, begin, end)
        is_fine = (end - begin) // COARSE < points // 2
        level, size = (self._fine, FINE) if is_fine else (self._coarse, COARSE)
        heads = level.heads()
        first = int(np.searchsorted(heads[:, 1], begin))
        last = int(np.searchsorted(heads[:, 0], end))
        stats = level.stats(columns, first, last)
        steps = heads[first:last, 0]
        if not is_fine:  # the steps that no coarse bucket has yet
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

    def _view_lines(self, columns: Int[np.ndarray, " C"], begin: int, end: int) -> View:
        heads = self._fine.heads()
        bucket = int(np.searchsorted(heads[:, 1], begin))
        place = int(heads[bucket, 2]) if bucket < len(heads) else self._bucket.place
        rows: dict[int, np.ndarray] = {}
        for line in self._lines_that_count(place):
            if line["step"] >= end:
                break
            if line["step"] >= begin:
                row = rows.setdefault(line["step"], np.full(len(columns), np.nan))
                places, values = self.columns.row(line)
                for at, column in enumerate(columns):
                    if len(hit := np.flatnonzero(places == column)):
                        row[at] = values[hit[0]]
        steps = np.array(sorted(rows), np.int64)
        found = np.array([rows[int(step)] for step in steps]).reshape(len(steps), len(columns))
        return View(steps, 1, found, found, found)

    def _lines_that_count(self, place: int) -> Iterator[dict[str, Any]]:
        """Lines of steps from a place to where `feed` has read."""
        with open_regular(self._source) as file:
            tail = Tail(file, place)
            while (place := tail.place) < self._place:
                text = tail.next_line()
                if text is None:
                    return
                line = read_line(text)
                if line is None or "event" in line.fields:
                    continue
                if self._restarts.counts(place, line.fields["step"]):
                    yield line.fields
                else:
                    tail.seek(self._restarts.next_place(place))

    def total_skipped(self) -> float:
        """How often an update was refused."""
        column = self.columns.place(_SKIPPED)
        if column is None:
            return 0.0
        if self._skipped is None:
            stats = self._fine.stats(np.array([column]), 0, len(self._fine))
            self._skipped = _total(stats, 0)
        if not self._bucket.rows:
            return self._skipped
        return self._skipped + _total(self._bucket.stats(len(self.columns.names))[None], column)


class _Bucket:
    """Lines of the newest steps, not on disk yet."""

    def __init__(self) -> None:
        self.first, self.last, self.place = 0, -1, 0
        self.rows: list[tuple[int, np.ndarray, np.ndarray]] = []

    def add(self, step: int, place: int, columns: np.ndarray, values: np.ndarray) -> None:
        if not self.rows:
            self.first, self.place = step, place
        self.first, self.last = min(step, self.first), max(step, self.last)
        self.rows.append((step, columns, values))

    def cut(self, step: int) -> None:
        """Drop the lines of a step and of later ones."""
        self.rows = [row for row in self.rows if row[0] < step]
        self.last = max((row[0] for row in self.rows), default=-1)

    def stats(self, series: int) -> Float[np.ndarray, "4 C"]:
        whole = np.full((len(self.rows), series), np.nan)
        for row, (_, columns, values) in zip(whole, self.rows, strict=True):
            row[columns] = values
        return summed_up(whole)


def _total(stats: Float[np.ndarray, "N 4 C"], column: int | None) -> float:
    """Sum of all numbers of a column, of which buckets have means and counts."""
    if column is None:
        return 0.0
    mean, count = stats[:, 2, column].astype(np.float64), stats[:, 3, column]
    return float((mean[count > 0] * count[count > 0]).sum())


def _reduced(steps: np.ndarray, stats: np.ndarray, points: int, size: int) -> View:
    """Merge neighbours until there are at most `points`."""
    group = max(1, -(-len(steps) // points))
    if group > 1:
        parts = range(0, len(steps), group)
        stats = np.array([merged(stats[i : i + group]) for i in parts])
        steps = steps[::group]
    return View(steps, size * group, stats[:, 0], stats[:, 1], stats[:, 2])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
