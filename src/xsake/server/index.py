"""Index of a metrics file for fast plots of long runs.

The index has minimum, maximum and mean of each series for every 64 and every 1024 steps, and the
offsets of the lines. It is stored in the cache folder of the server, grows with `metrics.jsonl`,
and is rebuilt if that file is replaced or the index is damaged. It may be deleted at any time.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from xsake.observability.metrics import MAX_SERIES
from xsake.server.buckets import Buckets, DamagedIndexError, merge_buckets, summarize_rows
from xsake.server.columns import Columns
from xsake.server.lines import read_line
from xsake.server.restarts import Restarts
from xsake.server.tail import LineReader, file_identity, open_regular, stat_regular

FINE, COARSE = 64, 1024  # steps per bucket
_VERSION = 3
_MAX_ABOUT = 2**22  # bytes of index.json
_SKIPPED = "is_skipped"
_MAX_RAW = 2048  # steps read from metrics.jsonl itself


@dataclass(frozen=True)
class SeriesView:
    """Downsampled series.

    Args:
        steps: first step of every point.
        resolution: steps per point; 1: no downsampling.
        minimum: by point and series; NaN for missing values.
        maximum: by point and series.
        mean: over the lines that have a value.
    """

    steps: Int[np.ndarray, " N"]
    resolution: int
    minimum: Float[np.ndarray, "N C"]
    maximum: Float[np.ndarray, "N C"]
    mean: Float[np.ndarray, "N C"]


class MetricsIndex:
    """Index of one run; a single thread calls `feed`.

    Args:
        source: the run's metrics.jsonl.
        folder: for its files; created with the first bucket.
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
        """Read index.json; raise an error handled by `_open` unless it matches the source."""
        with open_regular(self._folder / "index.json") as file:
            text = file.read(_MAX_ABOUT + 1)
        if len(text) > _MAX_ABOUT:
            raise DamagedIndexError("index.json is too large")
        about = json.loads(text)
        if about["version"] != _VERSION or about["identity"] != self._identity:
            raise DamagedIndexError("index of another file")
        names, began = about["names"], about["began"]
        is_valid = (
            isinstance(names, list) and len(set(names)) == len(names) <= MAX_SERIES
            and all(isinstance(name, str) and len(name) <= 64 for name in names)
            and all(_is_count(x) for x in (about["counted"], *about["dropped"]))
            and all(len(pair) == 2 and all(map(_is_count, pair)) for pair in began)
            and len(about["dropped"]) == 2
        )  # fmt: skip
        if not is_valid:
            raise DamagedIndexError("index.json")
        return about

    def _load(self, about: dict[str, Any]) -> None:
        self.columns = Columns(about["names"])
        self._restarts = Restarts([(offset, step) for offset, step in about["began"]])
        self._counted = about["counted"]
        self.dropped_lines, self.dropped_values = about["dropped"]
        self._fine, self._coarse = Buckets(self._folder, "fine"), Buckets(self._folder, "coarse")
        size = stat_regular(self._source).st_size
        if max(self._fine.last[2], self._coarse.last[2]) > size:
            raise DamagedIndexError("offsets beyond the end of the file")
        self._num_named, self._is_changed = len(self.columns.names), False
        self._is_inside_long = False
        self._skipped: float | None = None
        self._rewind(len(self._fine) - 1)

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
        """Flush to disk."""
        if self._is_changed and self._folder.exists():
            self._write_about()

    def _rewind(self, count: int) -> None:
        """Keep the first `count` fine buckets and read the lines of the next one again."""
        heads = self._fine.heads()
        offset = int(heads[count, 2]) if 0 <= count < len(heads) else 0
        self._fine.keep(max(count, 0))
        self._coarse.keep(int((self._coarse.heads()[:, 1] <= self._fine.last[1]).sum()))
        self._offset, self._bucket = offset, _Bucket()
        self._is_inside_long, self._skipped = False, None

    @property
    def offset(self) -> int:
        """Number of bytes read."""
        return self._offset

    @property
    def last_step(self) -> int:
        """Highest step; -1 if there is none."""
        return max(self._fine.last[1], self._bucket.last)

    def feed(self, max_lines: int = 4096) -> list[dict[str, Any]]:
        """Read and return new lines, events included; sets `is_at_end`.

        Args:
            max_lines: maximum number of lines per call.
        """
        if self._is_other_file():
            self._open()
        new_lines: list[dict[str, Any]] = []
        self.is_at_end = False
        with open_regular(self._source) as file:
            reader = LineReader(file, self._offset, is_inside_long=self._is_inside_long)
            for _ in range(max_lines):
                offset = reader.offset
                text = reader.next_line()
                if text is None:
                    self.is_at_end = True
                    break
                self._offset, self._is_inside_long = reader.offset, reader.is_inside_long
                is_new = offset >= self._counted
                line = self._read(text, is_new)
                if line is not None:
                    if is_new:
                        new_lines.append(line)
                    self._take(offset, line, is_new)
                if self._offset != reader.offset:
                    reader.seek(self._offset)
        return new_lines

    def _is_other_file(self) -> bool:
        is_shorter = stat_regular(self._source).st_size < self._offset
        return is_shorter or file_identity(self._source) != self._identity

    def _read(self, text: bytes, is_new: bool) -> dict[str, Any] | None:
        """Validate a line and count invalid values."""
        line = read_line(text)
        if is_new:
            self._counted = self._offset
            self._drop(int(line is None and bool(text.strip())), line.num_dropped if line else 0)
        return None if line is None else line.fields

    def _drop(self, num_lines: int, num_values: int) -> None:
        if num_lines or num_values:
            self.dropped_lines += num_lines
            self.dropped_values += num_values
            self._is_changed = True

    def _take(self, offset: int, line: dict[str, Any], is_new: bool) -> None:
        """Process a line; moves `_offset` if other lines have to be read next."""
        if line.get("event") == "began":
            if self._restarts.add(offset, line["from_step"]):
                self._is_changed = True
                self._go_back(line["from_step"])
        elif "event" not in line:
            if not self._restarts.is_current(offset, line["step"]):
                self._offset = self._restarts.next_offset(offset)
            elif self._is_in_order(line["step"]):
                self._add(offset, line)
            elif is_new:
                self._drop(1, 0)

    def _go_back(self, step: int) -> None:
        """Drop a step and later ones; earlier lines of its bucket are kept."""
        if self.last_step < step:
            return
        if self._bucket.rows and self._bucket.first // FINE == step // FINE:
            self._bucket.truncate(step)
            return
        offset, heads = self._offset, self._fine.heads()
        count = int(np.searchsorted(heads[:, 0], step // FINE * FINE))
        is_cut = count < len(heads) and heads[count, 0] < step
        self._rewind(count)
        if not is_cut:
            self._offset = offset  # the bucket has no line before the step

    def _is_in_order(self, step: int) -> bool:
        """Whether a step belongs to the newest bucket or a later one."""
        if self._bucket.rows:
            return step // FINE >= self._bucket.first // FINE
        return step // FINE > self._fine.last[1] // FINE

    def _add(self, offset: int, line: dict[str, Any]) -> None:
        step = line["step"]
        if self._bucket.rows and step // FINE != self._bucket.first // FINE:
            self._close(step)
        self._bucket.add(step, offset, *self.columns.row(line))

    def _close(self, next_step: int) -> None:
        if self._is_changed or len(self.columns.names) != self._num_named:
            self._write_about()  # first: buckets need the names and restarts
        bucket, self._bucket = self._bucket, _Bucket()
        stats = bucket.stats(len(self.columns.names))
        self._fine.add(bucket.first, bucket.last, bucket.offset, stats.astype(np.float32))
        if self._skipped is not None:
            self._skipped += _total(stats[None], self.columns.find(_SKIPPED))
        if next_step // COARSE != bucket.first // COARSE:
            self._close_coarse(bucket.first // COARSE)

    def _close_coarse(self, number: int) -> None:
        heads = self._fine.heads()
        begin = int(np.searchsorted(heads[:, 0], number * COARSE))
        columns = np.arange(len(self.columns.names))
        stats = merge_buckets(self._fine.stats(columns, begin, len(heads)))
        first, _, offset = heads[begin].tolist()
        self._coarse.add(first, int(heads[-1, 1]), offset, stats.astype(np.float32))

    def view(self, names: Sequence[str], begin: int, end: int, points: int) -> SeriesView:
        """Return downsampled series between two steps.

        Args:
            names: of series; unknown ones are NaN.
            begin: first step.
            end: end of the range, exclusive.
            points: maximum number of points.
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
        if not is_fine:  # steps after the last coarse bucket
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
        return _downsample(steps, stats, points, size)

    def _column(self, name: str) -> int:
        column = self.columns.find(name)
        return len(self.columns.names) if column is None else column

    def _view_lines(self, columns: Int[np.ndarray, " C"], begin: int, end: int) -> SeriesView:
        heads = self._fine.heads()
        bucket = int(np.searchsorted(heads[:, 1], begin))
        offset = int(heads[bucket, 2]) if bucket < len(heads) else self._bucket.offset
        rows: dict[int, np.ndarray] = {}
        for line in self._current_lines(offset):
            if line["step"] >= end:
                break
            if line["step"] >= begin:
                row = rows.setdefault(line["step"], np.full(len(columns), np.nan))
                line_columns, values = self.columns.row(line)
                for at, column in enumerate(columns):
                    if len(hit := np.flatnonzero(line_columns == column)):
                        row[at] = values[hit[0]]
        steps = np.array(sorted(rows), np.int64)
        values = np.array([rows[int(step)] for step in steps]).reshape(len(steps), len(columns))
        return SeriesView(steps, 1, values, values, values)

    def _current_lines(self, offset: int) -> Iterator[dict[str, Any]]:
        """Yield current lines of steps from an offset to the last read position."""
        with open_regular(self._source) as file:
            reader = LineReader(file, offset)
            while (offset := reader.offset) < self._offset:
                text = reader.next_line()
                if text is None:
                    return
                line = read_line(text)
                if line is None or "event" in line.fields:
                    continue
                if self._restarts.is_current(offset, line.fields["step"]):
                    yield line.fields
                else:
                    reader.seek(self._restarts.next_offset(offset))

    def count_skips(self) -> float:
        """Return the number of skipped updates."""
        column = self.columns.find(_SKIPPED)
        if column is None:
            return 0.0
        if self._skipped is None:
            stats = self._fine.stats(np.array([column]), 0, len(self._fine))
            self._skipped = _total(stats, 0)
        if not self._bucket.rows:
            return self._skipped
        return self._skipped + _total(self._bucket.stats(len(self.columns.names))[None], column)


class _Bucket:
    """Newest bucket, in memory."""

    def __init__(self) -> None:
        self.first, self.last, self.offset = 0, -1, 0
        self.rows: list[tuple[int, np.ndarray, np.ndarray]] = []

    def add(self, step: int, offset: int, columns: np.ndarray, values: np.ndarray) -> None:
        if not self.rows:
            self.first, self.offset = step, offset
        self.first, self.last = min(step, self.first), max(step, self.last)
        self.rows.append((step, columns, values))

    def truncate(self, step: int) -> None:
        """Drop the lines of a step and of later ones."""
        self.rows = [row for row in self.rows if row[0] < step]
        self.last = max((row[0] for row in self.rows), default=-1)

    def stats(self, series: int) -> Float[np.ndarray, "4 C"]:
        whole = np.full((len(self.rows), series), np.nan)
        for row, (_, columns, values) in zip(whole, self.rows, strict=True):
            row[columns] = values
        return summarize_rows(whole)


def _total(stats: Float[np.ndarray, "N 4 C"], column: int | None) -> float:
    """Sum a column from the means and counts of buckets."""
    if column is None:
        return 0.0
    mean, count = stats[:, 2, column].astype(np.float64), stats[:, 3, column]
    return float((mean[count > 0] * count[count > 0]).sum())


def _downsample(steps: np.ndarray, stats: np.ndarray, points: int, size: int) -> SeriesView:
    """Merge adjacent buckets to at most `points`."""
    group = max(1, -(-len(steps) // points))
    if group > 1:
        parts = range(0, len(steps), group)
        stats = np.array([merge_buckets(stats[i : i + group]) for i in parts])
        steps = steps[::group]
    return SeriesView(steps, size * group, stats[:, 0], stats[:, 1], stats[:, 2])


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
