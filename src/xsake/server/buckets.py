"""Buckets on disk: minimum, maximum, mean and count per series; append-only and memory-mapped.

A file has records of one width. When the number of series grows, a wider file is added.
"""

import array
import os
import re
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from xsake.observability.metrics import MAX_SERIES

MIN, MAX, MEAN, COUNT = range(4)
_WIDTH_STEP = 64
_MAX_BYTES = 2**30  # per run


class DamagedIndexError(Exception):
    """The files of an index are damaged; it has to be rebuilt."""


def padded_width(series: int) -> int:
    """Return the number of columns of a file for a number of series."""
    return max(_WIDTH_STEP, -(-series // _WIDTH_STEP) * _WIDTH_STEP)


def record_dtype(width: int) -> np.dtype:
    """Return the dtype of a bucket: first and last step, offset of its first line, statistics."""
    header = [(name, "<i8") for name in ("first", "last", "offset")]
    return np.dtype([*header, ("stats", "<f4", (4, width))])


class Buckets:
    """Buckets of one size. No file stays open between calls.

    Args:
        folder: for the files; created with the first bucket.
        name: of the files.

    Raises:
        DamagedIndexError: steps or offsets of the buckets are not in order.
    """

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._parts = sorted(self._find_parts())  # (width, path)
        self._rows = [
            path.stat().st_size // record_dtype(width).itemsize for width, path in self._parts
        ]
        maps = [self._map(part) for part in range(len(self._parts))]
        columns = [[x[name] for x in maps] for name in ("first", "last", "offset")]
        heads = np.stack([np.concatenate(x) for x in columns], 1) if maps else np.zeros((0, 3), int)
        steps = heads[:, :2].ravel()
        is_valid = (np.diff(steps) >= 0).all() and (np.diff(heads[:, 2]) > 0).all()
        if not is_valid or (heads[:, ::2].min(initial=0) < 0):
            raise DamagedIndexError(f"{name}: steps or offsets are not in order")
        self._heads = array.array("q", heads.ravel().tolist())

    def _find_parts(self) -> list[tuple[int, Path]]:
        parts = []
        for path in self._folder.glob(f"{self._name}-*.buckets"):
            width = path.stem.removeprefix(f"{self._name}-")
            is_width = re.fullmatch("[0-9]{1,8}", width) is not None
            if not is_width or int(width) % _WIDTH_STEP or not 0 < int(width) <= MAX_SERIES:
                raise DamagedIndexError(f"{self._name}: invalid width")
            parts.append((int(width), path))
        return parts

    def __len__(self) -> int:
        return len(self._heads) // 3

    @property
    def num_bytes(self) -> int:
        """Total size of the files."""
        sizes = (record_dtype(width).itemsize for width, _ in self._parts)
        return sum(rows * size for rows, size in zip(self._rows, sizes, strict=True))

    def add(self, first: int, last: int, offset: int, stats: Float[np.ndarray, "4 S"]) -> None:
        """Append a bucket.

        Args:
            first: its first step.
            last: its last step.
            offset: of its first line.
            stats: of all series.
        """
        width = self._parts[-1][0] if self._parts else 0
        if stats.shape[1] > width:
            width = padded_width(stats.shape[1])
            self._parts.append((width, self._folder / f"{self._name}-{width}.buckets"))
            self._rows.append(0)
        row = np.zeros((), record_dtype(width))
        if self.num_bytes + row.nbytes > _MAX_BYTES:
            raise OSError(27, f"An index larger than {_MAX_BYTES >> 20} MiB")
        row["stats"][:COUNT] = np.nan
        row["first"], row["last"], row["offset"] = first, last, offset
        row["stats"][:, : stats.shape[1]] = stats
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with self._parts[-1][1].open("ab") as file:
            file.write(row.tobytes())
        self._rows[-1] += 1
        self._heads.extend((first, last, offset))

    def keep(self, count: int) -> None:
        """Keep the first `count` buckets; a partial record at the end is dropped."""
        left, parts, kept = count, [], []
        for (width, path), rows in zip(self._parts, self._rows, strict=True):
            rows = min(rows, left)
            left -= rows
            if rows:
                os.truncate(path, rows * record_dtype(width).itemsize)
                parts.append((width, path))
                kept.append(rows)
            else:
                path.unlink(missing_ok=True)
        self._parts, self._rows = parts, kept
        del self._heads[3 * count :]

    def _map(self, part: int) -> np.ndarray:
        (width, path), rows = self._parts[part], self._rows[part]
        dtype = record_dtype(width)
        return np.memmap(path, dtype, "r", shape=(rows,)) if rows else np.zeros(0, dtype)

    @property
    def last(self) -> tuple[int, int, int]:
        """First step, last step and offset of the newest bucket; -1, -1, 0 if there is none."""
        first, last, offset = self._heads[-3:] or (-1, -1, 0)
        return first, last, offset

    def heads(self) -> Int[np.ndarray, "N 3"]:
        """Return first step, last step and offset of every bucket."""
        return np.array(self._heads, np.int64).reshape(-1, 3)

    def stats(
        self, columns: Int[np.ndarray, " C"], begin: int, end: int
    ) -> Float[np.ndarray, "N 4 C"]:
        """Return statistics of buckets and columns; missing ones are NaN with a count of 0.

        Args:
            columns: of the index.
            begin: first bucket.
            end: end of the range, exclusive.
        """
        chunks, start = [], 0
        for part, (width, _) in enumerate(self._parts):
            begin_row, end_row = max(begin - start, 0), max(end - start, 0)
            start += self._rows[part]
            if begin_row >= self._rows[part] or not end_row:
                continue
            rows = self._map(part)[begin_row:end_row]
            picked = np.asarray(rows["stats"][:, :, np.minimum(columns, width - 1)])
            is_missing = columns >= width
            picked[:, :COUNT, is_missing] = np.nan
            picked[:, COUNT, is_missing] = 0
            chunks.append(picked)
        return np.concatenate(chunks) if chunks else np.zeros((0, 4, len(columns)), np.float32)


def merge_buckets(stats: Float[np.ndarray, "N 4 C"]) -> Float[np.ndarray, "4 C"]:
    """Merge buckets into one."""
    counts = stats[:, COUNT].astype(np.float64)
    total = counts.sum(0)
    means = np.where(counts > 0, stats[:, MEAN], 0)
    mean = (means * counts).sum(0) / np.where(total > 0, total, np.nan)
    minimum = np.fmin.reduce(stats[:, MIN], axis=0)
    return np.stack([minimum, np.fmax.reduce(stats[:, MAX], axis=0), mean, total])


def summarize_rows(rows: Float[np.ndarray, "N C"]) -> Float[np.ndarray, "4 C"]:
    """Summarize rows as one bucket; NaN marks missing values."""
    is_present = ~np.isnan(rows)
    count = is_present.sum(0)
    mean = np.where(is_present, rows, 0).sum(0) / np.where(count > 0, count, np.nan)
    return np.stack([np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0), mean, count])
