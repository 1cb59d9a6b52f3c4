"""Index of a metrics file for fast plots of long runs: an SQLite file in the server's cache.

It has minimum, maximum, mean and count of each series for every 64 and every 1024 steps, and the
offsets of their lines. It grows with `metrics.jsonl`, and is rebuilt if that file is replaced or
the index is damaged. It may be deleted at any time.
"""

import bisect
import contextlib
import itertools
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from pydantic import BaseModel, Field

from xsake._schema import Count
from xsake.observability.log import MAX_STEP
from xsake.observability.metrics import MAX_SERIES
from xsake.server.artifacts import open_regular, stat_regular
from xsake.server.metrics_lines import LineReader, MetricsLine, file_identity, read_line

FINE, COARSE = 64, 1024  # steps per bucket
_MAX_RAW = 2048  # steps read from metrics.jsonl itself
_MAX_SIGNATURES = 256  # cached sets of series of a line
_MAX_BYTES = 2**30  # per run
_SKIPPED = "is_skipped"
_SCHEMA = """
PRAGMA page_size = 16384;
PRAGMA synchronous = OFF;
CREATE TABLE IF NOT EXISTS state (json TEXT);
CREATE TABLE IF NOT EXISTS buckets (size, first, last, offset, skipped, stats BLOB);
CREATE UNIQUE INDEX IF NOT EXISTS heads ON buckets (size, first, last, offset, skipped);
"""


class SeriesView(NamedTuple):
    """Downsampled series; NaN for missing values."""

    steps: Int[np.ndarray, " N"]  # first one of every point
    resolution: int  # steps per point; 1: no downsampling
    minimum: Float[np.ndarray, "N C"]
    maximum: Float[np.ndarray, "N C"]
    mean: Float[np.ndarray, "N C"]  # over the lines that have a value


class _State(BaseModel, strict=True):
    """Everything but the buckets; stored as JSON in the transaction that changes them.

    An attempt of the run is (offset of its event, first step). It supersedes earlier lines of that
    step and of later ones; attempts that are superseded themselves are left out.
    """

    version: Literal[4] = 4
    identity: str
    names: list[Annotated[str, Field(max_length=64)]] = Field([], max_length=MAX_SERIES)
    attempts: list[tuple[Count, Count]] = []
    offset: Count = 0  # of the first line that is not in a bucket
    counted: Count = 0  # bytes whose invalid lines and values are counted
    dropped_lines: Count = 0
    dropped_values: Count = 0


class MetricsIndex:
    """Index of one metrics.jsonl; not thread-safe. No file stays open between calls.

    Its own file is created with the first bucket.
    """

    def __init__(self, source: Path, path: Path):
        self._source, self._path = source, path
        self._connection: sqlite3.Connection | None = None
        self.num_rebuilt, self.is_at_end = 0, False
        self._load()

    def _load(self) -> None:
        identity = file_identity(self._source)
        try:
            with self._transaction():
                rows = self._query("SELECT json FROM state")
                last = self._query("SELECT max(last) FROM buckets WHERE size = ?", FINE)
            self.state = _State.model_validate_json(rows[0][0]) if rows else _State(identity="")
            self._last_closed = last[0][0] if last and last[0][0] is not None else -1
            size = stat_regular(self._source).st_size
            if self.state.identity != identity or self.state.counted > size:
                raise ValueError("the index of another file")
        except (sqlite3.Error, ValueError, TypeError):
            self.num_rebuilt += self._path.exists()
            self._path.unlink(missing_ok=True)
            self.state, self._last_closed = _State(identity=identity), -1
        self._columns = {name: column for column, name in enumerate(self.state.names)}
        self._signatures: dict[tuple[Any, ...], Int[np.ndarray, " S"]] = {}
        self._skipped: float | None = None  # in closed buckets
        self._restart_at(self.state.offset)

    def _restart_at(self, offset: int) -> None:
        """Read next the line at an offset, which is the first one of a new bucket."""
        self.offset, self._is_inside_long = offset, False
        self._bucket: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # step, offset, ...

    @contextlib.contextmanager
    def _transaction(self, *, is_write: bool = False) -> Iterator[None]:
        """Commit the changes of the body with the state, and close the database."""
        try:
            yield
            if is_write and self._connection is not None and self._connection.in_transaction:
                self._execute("DELETE FROM state")
                self._execute("INSERT INTO state VALUES (?)", self.state.model_dump_json())
                self._connection.commit()
        finally:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if self._connection is None:
            self._connection = sqlite3.connect(self._path)
            self._connection.executescript(_SCHEMA)
        return self._connection.execute(sql, values)

    def _query(self, sql: str, *values: Any) -> list[Any]:
        """Return rows; none without an index, which is not created."""
        return self._execute(sql, *values).fetchall() if self._path.exists() else []

    @property
    def last_step(self) -> int:
        """Highest step; -1 if there is none."""
        return max((row[0] for row in self._bucket), default=self._last_closed)

    def feed(self, max_lines: int = 4096) -> list[MetricsLine]:
        """Read and return at most `max_lines` new lines, events included; sets `is_at_end`."""
        is_shorter = stat_regular(self._source).st_size < self.offset
        if is_shorter or file_identity(self._source) != self.state.identity:
            self._load()
        new_lines: list[MetricsLine] = []
        self.is_at_end = False
        with open_regular(self._source) as file, self._transaction(is_write=True):
            reader = LineReader(file, self.offset, is_inside_long=self._is_inside_long)
            for _ in range(max_lines):
                offset = reader.offset
                text = reader.next_line()
                if text is None:
                    self.is_at_end = True
                    break
                self.offset, self._is_inside_long = reader.offset, reader.is_inside_long
                line, is_new = read_line(text), offset >= self.state.counted
                if is_new:
                    self.state.counted = self.offset
                    self.state.dropped_lines += line is None and bool(text.strip())
                    self.state.dropped_values += line.num_dropped if line else 0
                if line is not None:
                    if is_new:
                        new_lines.append(line)
                    self._take(offset, line, is_new)
                if self.offset != reader.offset:
                    reader.seek(self.offset)
        return new_lines

    def _take(self, offset: int, line: MetricsLine, is_new: bool) -> None:
        """Process a line; moves `offset` if other lines have to be read next."""
        if line.fields.get("event") == "began":
            step = line.fields["from_step"]
            if self._add_attempt(offset, step) and self.last_step >= step:
                self._go_back(step)
        elif "event" not in line.fields:
            step = line.fields["step"]
            newest = self._bucket[0][0] if self._bucket else self._last_closed + FINE
            if (next_offset := self._superseded_until(offset, step)) is not None:
                self.offset = next_offset
            elif step // FINE >= newest // FINE:
                if self._bucket and step // FINE != newest // FINE:
                    self._close_bucket(step, offset)
                self._bucket.append((step, offset, *self._row(line)))
            elif is_new:
                self.state.dropped_lines += 1

    def _add_attempt(self, offset: int, step: int) -> bool:
        """Add an attempt; return False if nothing changes."""
        attempts = self.state.attempts
        index = bisect.bisect_left(attempts, (offset, -1))
        if index < len(attempts) and attempts[index][1] <= step:
            return False
        begin = index
        while begin and attempts[begin - 1][1] >= step:
            begin -= 1
        attempts[begin:index] = [(offset, step)]
        return True

    def _superseded_until(self, offset: int, step: int) -> int | None:
        """Return the offset of the attempt that supersedes a line; None if it is current."""
        attempts = self.state.attempts
        index = bisect.bisect_right(attempts, (offset, MAX_STEP))
        is_current = index == len(attempts) or step < attempts[index][1]
        return None if is_current else attempts[index][0]

    def _go_back(self, step: int) -> None:
        """Drop a step and later ones; earlier lines of its bucket are kept or read again."""
        slot = step // FINE * FINE
        if self._bucket and self._bucket[0][0] >= slot and self._last_closed < slot:
            self._bucket = [row for row in self._bucket if row[0] < step]
            return
        found = "SELECT first, offset FROM buckets WHERE size = ? AND first >= ? ORDER BY first"
        rows = self._query(f"{found} LIMIT 1", FINE, slot)
        first, offset = rows[0] if rows else (step, self.offset)
        for size in (FINE, COARSE):
            oldest = step // size * size
            self._execute("DELETE FROM buckets WHERE size = ? AND first >= ?", size, oldest)
        last = self._query("SELECT max(last) FROM buckets WHERE size = ?", FINE)[0][0]
        self._last_closed = -1 if last is None else last
        self._skipped = None
        self._restart_at(offset if first < step else self.offset)
        self.state.offset = self.offset

    def _row(self, line: MetricsLine) -> tuple[Int[np.ndarray, " S"], Float[np.ndarray, " S"]]:
        """Return the columns and values of a line; series beyond `MAX_SERIES` are dropped."""
        shapes = ((name, *matrix.shape) for name, matrix in line.matrices.items())
        signature = (*line.scalars, *shapes)
        columns = self._signatures.get(signature)
        if columns is None:
            if len(self._signatures) >= _MAX_SIGNATURES:
                self._signatures.clear()
            columns = np.array([self._column(name) for name in _series_names(signature)], int)
            self._signatures[signature] = columns
        parts = (matrix.ravel() for matrix in line.matrices.values())
        values = np.concatenate([np.array([*line.scalars.values()], np.float64), *parts])
        return columns[columns >= 0], values[columns >= 0]

    def _column(self, name: str) -> int:
        if name not in self._columns:
            if len(self._columns) >= MAX_SERIES:
                return -1
            self._columns[name] = len(self._columns)
            self.state.names.append(name)
        return self._columns[name]

    def _bucket_stats(self) -> Float[np.ndarray, "1 4 C"]:
        rows = np.full((len(self._bucket), len(self._columns)), np.nan)
        for row, (_, _, columns, values) in zip(rows, self._bucket, strict=True):
            row[columns] = values
        return _merge(np.stack([rows, rows, rows, ~np.isnan(rows)], 1), len(rows))

    def _close_bucket(self, next_step: int, next_offset: int) -> None:
        stats, steps = self._bucket_stats(), [row[0] for row in self._bucket]
        self._last_closed = max(steps)
        skipped = _count_skips(stats, self._columns.get(_SKIPPED))
        self._insert(FINE, min(steps), max(steps), self._bucket[0][1], skipped, stats)
        self._skipped = None if self._skipped is None else self._skipped + skipped
        self.state.offset, self._bucket = next_offset, []
        slot = steps[0] // COARSE
        if next_step // COARSE != slot:
            begin, end = slot * COARSE, (slot + 1) * COARSE
            columns = np.arange(len(self._columns))
            steps, stats = self._select(FINE, columns, begin, end)
            stats = _merge(stats, len(stats))
            self._insert(COARSE, int(steps[0]), self._last_closed, 0, 0.0, stats)

    def _insert(self, *values: Any) -> None:
        *head, stats = values
        if self._path.exists() and self._path.stat().st_size > _MAX_BYTES:
            raise OSError(27, f"An index larger than {_MAX_BYTES >> 20} MiB")
        blob = stats.astype("<f4").tobytes()
        self._execute("INSERT INTO buckets VALUES (?, ?, ?, ?, ?, ?)", *head, blob)

    def _select(
        self, size: int, columns: Int[np.ndarray, " C"], begin: int, end: int
    ) -> tuple[Int[np.ndarray, " N"], Float[np.ndarray, "N 4 C"]]:
        """Return first steps and statistics of the buckets between two steps."""
        steps: list[int] = []
        chunks = [np.zeros((0, 4, len(columns)), np.float32)]
        if self._path.exists():
            cursor = self._execute(
                "SELECT first, stats FROM buckets WHERE size = ? AND first >= ? AND first < ? AND "
                "last >= ? ORDER BY first", size, begin // size * size, end, begin,
            )  # fmt: skip
            while rows := cursor.fetchmany(256):
                steps += [row[0] for row in rows]
                for _, group in itertools.groupby(rows, lambda row: len(row[1])):
                    chunks.append(_pick([row[1] for row in group], columns))
        return np.array(steps, np.int64), np.concatenate(chunks)

    def view(self, names: Sequence[str], begin: int, end: int, points: int) -> SeriesView:
        """Return at most `points` points of series between two steps; unknown series are NaN."""
        end = min(end, self.last_step + 1)
        columns = np.array([self._columns.get(name, len(self._columns)) for name in names], int)
        with self._transaction():
            if end - begin <= min(points, _MAX_RAW):
                return self._view_lines(columns, begin, end)
            is_fine = (end - begin) // COARSE < points // 2
            size = FINE if is_fine else COARSE
            steps, stats = self._select(size, columns, begin, end)
            if not is_fine:  # steps after the last coarse bucket
                last = self._query("SELECT max(first) FROM buckets WHERE size = ?", COARSE)
                after = 0 if not last or last[0][0] is None else (last[0][0] // COARSE + 1) * COARSE
                more = self._select(FINE, columns, max(begin, after), end)
                steps, stats = np.append(steps, more[0]), np.concatenate([stats, more[1]])
        first = min((row[0] for row in self._bucket), default=end)
        if first < end and self.last_step >= begin:
            newest = _pick([self._bucket_stats().astype("<f4").tobytes()], columns)
            steps, stats = np.append(steps, first), np.concatenate([stats, newest])
        group = max(1, -(-len(steps) // points))
        merged = _merge(stats, group)
        return SeriesView(steps[::group], size * group, merged[:, 0], merged[:, 1], merged[:, 2])

    def _view_lines(self, columns: Int[np.ndarray, " C"], begin: int, end: int) -> SeriesView:
        """Return single steps from metrics.jsonl itself."""
        found = "SELECT offset FROM buckets WHERE size = ? AND first >= ? AND last >= ?"
        first = self._query(f"{found} ORDER BY first LIMIT 1", FINE, begin // FINE * FINE, begin)
        open_offset = self._bucket[0][1] if self._bucket else self.offset
        rows: dict[int, np.ndarray] = {}
        whole = np.empty(len(self._columns) + 1)
        for line in self._current_lines(first[0][0] if first else open_offset):
            step = line.fields["step"]
            if step >= end:
                break
            if step >= begin:
                line_columns, values = self._row(line)
                whole[:] = np.nan
                whole[line_columns] = values
                row = whole[columns]
                rows[step] = np.where(np.isnan(row), rows[step], row) if step in rows else row
        steps = np.array(sorted(rows), np.int64)
        values = np.array([rows[step] for step in steps.tolist()]).reshape(len(steps), len(columns))
        return SeriesView(steps, 1, values, values, values)

    def _current_lines(self, offset: int) -> Iterator[MetricsLine]:
        """Yield current lines of steps from an offset to the last read position."""
        with open_regular(self._source) as file:
            reader = LineReader(file, offset)
            while (offset := reader.offset) < self.offset:
                text = reader.next_line()
                if text is None:
                    return
                line = read_line(text)
                if line is None or "event" in line.fields:
                    continue
                next_offset = self._superseded_until(offset, line.fields["step"])
                if next_offset is None:
                    yield line
                else:
                    reader.seek(next_offset)

    def count_skips(self) -> float:
        """Return the number of skipped updates."""
        if self._skipped is None:
            with self._transaction():
                total = self._query("SELECT total(skipped) FROM buckets WHERE size = ?", FINE)
            self._skipped = total[0][0] if total else 0.0
        if not self._bucket:
            return self._skipped
        return self._skipped + _count_skips(self._bucket_stats(), self._columns.get(_SKIPPED))


def _series_names(signature: tuple[Any, ...]) -> Iterator[str]:
    for part in signature:
        if isinstance(part, str):
            yield part
        else:
            name, layers, heads = part
            yield from (f"{name}/{i}/{j}" for i in range(layers) for j in range(heads))


def _pick(blobs: list[bytes], columns: Int[np.ndarray, " C"]) -> Float[np.ndarray, "N 4 C"]:
    """Return columns of stored statistics; missing ones are NaN with a count of 0."""
    stored = np.frombuffer(b"".join(blobs), "<f4").reshape(len(blobs), 4, -1)
    picked = np.full((len(blobs), 4, len(columns)), np.nan, np.float32)
    picked[:, 3] = 0
    is_stored = columns < stored.shape[2]
    picked[:, :, is_stored] = stored[:, :, columns[is_stored]]
    return picked


def _merge(stats: Float[np.ndarray, "N 4 C"], group: int) -> Float[np.ndarray, "M 4 C"]:
    """Merge minimum, maximum, mean and count of `group` adjacent buckets each."""
    starts = np.arange(0, len(stats), group)
    if group <= 1 or not len(stats):
        return stats
    counts = stats[:, 3].astype(np.float64)
    total = np.add.reduceat(counts, starts)
    sums = np.add.reduceat(np.where(counts > 0, stats[:, 2], 0) * counts, starts)
    minimum, maximum = np.fmin.reduceat(stats[:, 0], starts), np.fmax.reduceat(stats[:, 1], starts)
    return np.stack([minimum, maximum, sums / np.where(total > 0, total, np.nan), total], 1)


def _count_skips(stats: Float[np.ndarray, "1 4 C"], column: int | None) -> float:
    if column is None or not stats[0, 3, column]:
        return 0.0
    return float(stats[0, 2, column] * stats[0, 3, column])
