"""Token files: written atomically with digests, verified, and read by memory mapping."""

import collections
import dataclasses
import hashlib
import mmap
import os
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt

from xsake._io import atomic_write
from xsake.errors import ArgumentError
from xsake.training.data.index import REBUILD_FIX, Shard, Split, shard_path

Verify = Literal["full", "size"]
MAX_MAPS = 2**14  # per reader; the default limit of a process is 65,530


@dataclasses.dataclass(frozen=True)
class FinishedShard:
    """Written shard, and its end in the texts.

    Args:
        split: of the shard.
        number: in its split.
        shard: size and digest.
        piece: in which it ends.
        offset: tokens of that piece up to the end of the shard.
    """

    split: Split
    number: int
    shard: Shard
    piece: int
    offset: int


class ShardWriter:
    """Writer of a split's tokens as shards of equal size.

    Args:
        folder: of the build.
        split: of the shards.
        dtype: of tokens.
        size: tokens of a shard.
        finished_shards: existing shards, from the first on.
        on_finished: called for every written shard.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        *,
        dtype: np.dtype,
        size: int,
        finished_shards: Sequence[FinishedShard],
        on_finished: Callable[[FinishedShard], None],
    ):
        self.shards = [finished.shard for finished in finished_shards]
        self._folder, self._split, self._dtype, self._size = folder, split, dtype, size
        self._on_finished = on_finished
        self._piece, self._offset = (
            (finished_shards[-1].piece, finished_shards[-1].offset) if finished_shards else (0, 0)
        )
        self._parts: list[np.ndarray] = []
        self._buffered = 0

    @property
    def tokens(self) -> int:
        """Number of tokens, written and buffered."""
        return sum(shard.tokens for shard in self.shards) + self._buffered

    def needs(self, piece: int) -> bool:
        """Return whether some tokens of a piece are not in a written shard."""
        return piece >= self._piece

    def add(self, piece: int, tokens: UInt[np.ndarray, " n"]) -> None:
        """Add all tokens of the next needed piece."""
        used = self._offset if piece == self._piece else 0
        while self._buffered + len(tokens) - used >= self._size:
            end = used + self._size - self._buffered
            self._buffer(tokens[used:end])
            used = end
            self._write(piece, used)
        if used < len(tokens):
            self._buffer(tokens[used:])

    def finish(self, pieces: int) -> None:
        """Write the remaining tokens as the last shard; `pieces` is the number of all pieces."""
        if self._buffered:
            self._write(pieces, 0)

    def _buffer(self, tokens: UInt[np.ndarray, " n"]) -> None:
        self._parts.append(tokens)
        self._buffered += len(tokens)

    def _write(self, piece: int, offset: int) -> None:
        content = np.concatenate(self._parts).astype(self._dtype).tobytes()
        number = len(self.shards)
        atomic_write(shard_path(self._folder, self._split, number), content)
        digest = hashlib.blake2b(content, digest_size=32).hexdigest()
        self.shards.append(Shard(tokens=self._buffered, blake2b=digest))
        self._parts, self._buffered = [], 0
        self._on_finished(FinishedShard(self._split, number, self.shards[-1], piece, offset))


class ShardReader:
    """Reader of tokens from memory-mapped shards.

    A map holds a file descriptor, so at most `max_maps` are open: half of the process limit. Mapped
    files keep their content even if a new build replaces them. If a folder has more files, a
    replaced file that is mapped again raises an error.

    Args:
        paths: of existing shards.
        dtype: of tokens.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype):
        self._paths, self._dtype = paths, dtype
        self.max_maps = _max_maps()
        self._identities = [_identity(path.stat()) for path in paths]
        self._maps: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        self._guard = threading.Lock()
        for number in range(min(len(paths), self.max_maps)):
            self.tokens(number)

    def tokens(self, number: int) -> UInt[np.ndarray, " n"]:
        """Return all tokens of a shard; the least recently used map is closed if needed.

        Args:
            number: of the shard.
        """
        with self._guard:
            if number in self._maps:
                self._maps.move_to_end(number)
                return self._maps[number]
            if len(self._maps) >= self.max_maps:
                self._maps.popitem(last=False)  # closed when its last reader is done
            path = self._paths[number]
            with path.open("rb", buffering=0) as file:
                if _identity(os.fstat(file.fileno())) != self._identities[number]:
                    raise ArgumentError(
                        "a shard was replaced while it was in use",
                        got=path,
                        expected="the file from when the reader was opened",
                        fix="restart; build other data in another folder",
                    )
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[number] = np.frombuffer(mapped, self._dtype)
            return self._maps[number]


def _max_maps() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_MAPS if limit == resource.RLIM_INFINITY else max(1, min(MAX_MAPS, limit // 2))


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_ino, status.st_mtime_ns


def find_fault(path: Path, shard: Shard, itemsize: int, verify: Verify) -> str | None:
    """Return the problem of a shard's file, or None.

    Args:
        path: of the file.
        shard: expected size and digest.
        itemsize: bytes per token.
        verify: `size` checks the size; `full` reads the file.
    """
    if path.is_symlink() or not path.is_file():
        exists = path.is_symlink() or path.exists()
        return "not a regular file" if exists else "missing"
    size, expected = path.stat().st_size, shard.tokens * itemsize
    if size != expected:
        problem = "truncated" if size < expected else "too large"
        return f"{problem}: {size:,} bytes, expected {expected:,}"
    if verify == "full":
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        if digest.hexdigest() != shard.blake2b:
            return "damaged: the digest does not match"
    return None


def require_intact(path: Path, shard: Shard, itemsize: int, verify: Verify) -> None:
    """Raise if the file of a shard has a problem."""
    fault = find_fault(path, shard, itemsize, verify)
    if fault is not None:
        raise ArgumentError(
            f"a shard is {fault.partition(':')[0]}",
            got=f"{path}: {fault}",
            expected=f"{shard.tokens:,} tokens of {itemsize} bytes",
            fix=REBUILD_FIX,
        )
