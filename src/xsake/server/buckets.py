"""Buckets of a run's numbers on disk: least, most, mean and count, appended and read in place.

A file has records of one width. A run whose series become more goes on in a wider file.
"""

import array
import os
import re
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from xsake.observability.metrics import MOST_SERIES

LEAST, MOST, MEAN, COUNT = range(4)
_WIDTH_STEP = 64
_MAX_BYTES = 2**30  # of the files of one run


class DamagedIndexError(Exception):
    """Files of an index do not have what an index has; it has to be built again."""


def width_for(series: int) -> int:
    """Columns of a file that has room for a number of series."""
    return max(_WIDTH_STEP, -(-series // _WIDTH_STEP) * _WIDTH_STEP)


def record(width: int) -> np.dtype:
    """A bucket: its first and last step, where its first line stands, and four numbers a series."""
    places = [(name, "<i8") for name in ("first", "last", "place")]
    return np.dtype([*places, ("stats", "<f4", (4, width))])


class Buckets:
    """The buckets of one width of steps. No file stays open between two calls.

    Args:
        folder: for the files; made with the first bucket.
        name: of the files.

    Raises:
        DamagedIndexError: steps or places of the buckets are not in order.
    """

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._parts = sorted(self._find_parts())  # (width, path)
        self._rows = [path.stat().st_size // record(width).itemsize for width, path in self._parts]
        maps = [self._map(part) for part in range(len(self._parts))]
        columns = [[x[name] for x in maps] for name in ("first", "last", "place")]
        heads = np.stack([np.concatenate(x) for x in columns], 1) if maps else np.zeros((0, 3), int)
        steps = heads[:, :2].ravel()
        is_sound = (np.diff(steps) >= 0).all() and (np.diff(heads[:, 2]) > 0).all()
        if not is_sound or (heads[:, ::2].min(initial=0) < 0):
            raise DamagedIndexError(f"{name}: steps or places are not in order")
        self._heads = array.array("q", heads.ravel().tolist())

    def _find_parts(self) -> list[tuple[int, Path]]:
        found = []
        for path in self._folder.glob(f"{self._name}-*.buckets"):
            width = path.stem.removeprefix(f"{self._name}-")
            is_width = re.fullmatch("[0-9]{1,8}", width) is not None
            if not is_width or int(width) % _WIDTH_STEP or not 0 < int(width) <= MOST_SERIES:
                raise DamagedIndexError(f"{self._name}: a file of no known width")
            found.append((int(width), path))
        return found

    def __len__(self) -> int:
        return len(self._heads) // 3

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        sizes = (record(width).itemsize for width, _ in self._parts)
        return sum(rows * size for rows, size in zip(self._rows, sizes, strict=True))

    def add(self, first: int, last: int, place: int, stats: Float[np.ndarray, "4 S"]) -> None:
        """Append a bucket.

        Args:
            first: its first step.
            last: its last step.
            place: of its first line.
            stats: of all series that are known.
        """
        width = self._parts[-1][0] if self._parts else 0
        if stats.shape[1] > width:
            width = width_for(stats.shape[1])
            self._parts.append((width, self._folder / f"{self._name}-{width}.buckets"))
            self._rows.append(0)
        made = np.zeros((), record(width))
        if self.num_bytes + made.nbytes > _MAX_BYTES:
            raise OSError(27, f"An index larger than {_MAX_BYTES >> 20} MiB")
        made["stats"][:COUNT] = np.nan
        made["first"], made["last"], made["place"] = first, last, place
        made["stats"][:, : stats.shape[1]] = stats
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with self._parts[-1][1].open("ab") as file:
            file.write(made.tobytes())
        self._rows[-1] += 1
        self._heads.extend((first, last, place))

    def keep(self, count: int) -> None:
        """Drop all but the first `count` buckets, and half a record at the end."""
        left, parts, kept = count, [], []
        for (width, path), rows in zip(self._parts, self._rows, strict=True):
            rows = min(rows, left)
            left -= rows
            if rows:
                os.truncate(path, rows * record(width).itemsize)
                parts.append((width, path))
                kept.append(rows)
            else:
                path.unlink(missing_ok=True)
        self._parts, self._rows = parts, kept
        del self._heads[3 * count :]

    def _map(self, part: int) -> np.ndarray:
        (width, path), rows = self._parts[part], self._rows[part]
        kind = record(width)
        return np.memmap(path, kind, "r", shape=(rows,)) if rows else np.zeros(0, kind)

    @property
    def last(self) -> tuple[int, int, int]:
        """First step, last step and place of the newest bucket; -1, -1, 0 if there is none."""
        first, last, place = self._heads[-3:] or (-1, -1, 0)
        return first, last, place

    def heads(self) -> Int[np.ndarray, "N 3"]:
        """First step, last step and place of every bucket."""
        return np.array(self._heads, np.int64).reshape(-1, 3)

    def stats(
        self, columns: Int[np.ndarray, " C"], begin: int, end: int
    ) -> Float[np.ndarray, "N 4 C"]:
        """Return the numbers of some buckets and columns; NaN, and a count of 0, where none is.

        Args:
            columns: of the index.
            begin: first bucket.
            end: after the last one.
        """
        found, start = [], 0
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
            found.append(picked)
        return np.concatenate(found) if found else np.zeros((0, 4, len(columns)), np.float32)


def merged(stats: Float[np.ndarray, "N 4 C"]) -> Float[np.ndarray, "4 C"]:
    """One bucket of several."""
    counts = stats[:, COUNT].astype(np.float64)
    total = counts.sum(0)
    means = np.where(counts > 0, stats[:, MEAN], 0)
    mean = (means * counts).sum(0) / np.where(total > 0, total, np.nan)
    least = np.fmin.reduce(stats[:, LEAST], axis=0)
    return np.stack([least, np.fmax.reduce(stats[:, MOST], axis=0), mean, total])


def summed_up(rows: Float[np.ndarray, "N C"]) -> Float[np.ndarray, "4 C"]:
    """A bucket of single numbers, NaN where there is none."""
    is_there = ~np.isnan(rows)
    count = is_there.sum(0)
    mean = np.where(is_there, rows, 0).sum(0) / np.where(count > 0, count, np.nan)
    return np.stack([np.fmin.reduce(rows, axis=0), np.fmax.reduce(rows, axis=0), mean, count])
