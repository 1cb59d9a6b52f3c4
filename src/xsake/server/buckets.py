"""Buckets of a run's numbers on disk: least, most, mean and count, appended and read in place.

A file has records of one width. A run whose series become more goes on in a wider file.
"""

import os
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

LEAST, MOST, MEAN, COUNT = range(4)
_WIDTH_STEP = 64


def width_for(series: int) -> int:
    """Columns of a file that has room for so many series."""
    return max(_WIDTH_STEP, -(-series // _WIDTH_STEP) * _WIDTH_STEP)


def record(width: int) -> np.dtype:
    """A bucket: its first and last step, where its first line stands, and four numbers a series."""
    places = [(name, "<i8") for name in ("first", "last", "place")]
    return np.dtype([*places, ("stats", "<f4", (4, width))])


class Buckets:
    """The buckets of one width of steps.

    Args:
        folder: that exists.
        name: of the files.
    """

    def __init__(self, folder: Path, name: str):
        self._folder, self._name = folder, name
        self._parts = sorted(self._found())
        self._maps: dict[int, np.ndarray] = {}

    def _found(self) -> list[tuple[int, Path]]:
        paths = self._folder.glob(f"{self._name}-*.buckets")
        return [(int(path.stem.rpartition("-")[2]), path) for path in paths]

    def __len__(self) -> int:
        return sum(self._rows(*part) for part in self._parts)

    @staticmethod
    def _rows(width: int, path: Path) -> int:
        return path.stat().st_size // record(width).itemsize

    def add(self, first: int, last: int, place: int, stats: Float[np.ndarray, "4 S"]) -> None:
        """One more bucket, behind all others.

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
        made = np.zeros((), record(width))
        made["stats"][:COUNT] = np.nan
        made["first"], made["last"], made["place"] = first, last, place
        made["stats"][:, : stats.shape[1]] = stats
        with self._parts[-1][1].open("ab") as file:
            file.write(made.tobytes())

    def keep(self, count: int) -> None:
        """Forget all but the first so many; half a record at the end is forgotten too."""
        self._maps.clear()
        left, parts = count, []
        for width, path in self._parts:
            rows = min(self._rows(width, path), left)
            left -= rows
            if rows:
                os.truncate(path, rows * record(width).itemsize)
                parts.append((width, path))
            else:
                path.unlink()
        self._parts = parts

    def _map(self, width: int, path: Path) -> np.ndarray:
        rows, known = self._rows(width, path), self._maps.get(width)
        if known is None or len(known) != rows:
            if not rows:
                return np.zeros(0, record(width))
            known = self._maps[width] = np.memmap(path, record(width), "r", shape=(rows,))
        return known

    def heads(self) -> Int[np.ndarray, "N 3"]:
        """First step, last step and place of every bucket."""
        maps = [self._map(*part) for part in self._parts]
        if not maps:
            return np.zeros((0, 3), np.int64)
        columns = [np.concatenate([x[name] for x in maps]) for name in ("first", "last", "place")]
        return np.stack(columns, axis=1)

    def stats(
        self, columns: Int[np.ndarray, " C"], begin: int, end: int
    ) -> Float[np.ndarray, "N 4 C"]:
        """The numbers of some buckets and columns; NaN, and a count of 0, where nothing was told.

        Args:
            columns: of the index.
            begin: first bucket.
            end: after the last one.
        """
        found, start = [], 0
        for part in self._parts:
            whole = self._map(*part)
            rows = whole[max(begin - start, 0) : max(end - start, 0)]
            start += len(whole)
            width = part[0]
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
