"""Files of tokens: written whole with their digests, checked before they are believed, read."""

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
from xsake.training.data.index import AGAIN, Shard, Split, shard_path

Verify = Literal["full", "size"]
MAX_MAPS = 2**14  # of one reader: a process may have 65,530 by default


@dataclasses.dataclass(frozen=True)
class Finished:
    """A shard that is on the disk, and where in the texts it ends.

    Args:
        split: it belongs to.
        number: in its split.
        shard: what it holds.
        piece: of the texts, in which it ends.
        offset: tokens of that piece that are in it or in shards before it.
    """

    split: Split
    number: int
    shard: Shard
    piece: int
    offset: int


class ShardWriter:
    """Cuts the stream of a split into shards of equal size, and the last.

    Args:
        folder: that they go to.
        split: that they belong to.
        dtype: of tokens.
        size: tokens of a shard.
        kept: shards that are there already, from the first on.
        note: is told of every shard when it is on the disk.
    """

    def __init__(
        self,
        folder: Path,
        split: Split,
        *,
        dtype: np.dtype,
        size: int,
        kept: Sequence[Finished],
        note: Callable[[Finished], None],
    ):
        self.shards = [finished.shard for finished in kept]
        self._folder, self._split, self._dtype, self._size = folder, split, dtype, size
        self._note = note
        self._piece, self._offset = (kept[-1].piece, kept[-1].offset) if kept else (0, 0)
        self._parts: list[np.ndarray] = []
        self._held = 0

    @property
    def tokens(self) -> int:
        """In shards and waiting for one."""
        return sum(shard.tokens for shard in self.shards) + self._held

    def needs(self, piece: int) -> bool:
        """Whether tokens of a piece are not yet in a shard that is there."""
        return piece >= self._piece

    def add(self, piece: int, tokens: UInt[np.ndarray, " n"]) -> None:
        """The tokens of the next piece that is needed, all of them."""
        taken = self._offset if piece == self._piece else 0
        while self._held + len(tokens) - taken >= self._size:
            end = taken + self._size - self._held
            self._hold(tokens[taken:end])
            taken = end
            self._write(piece, taken)
        if taken < len(tokens):
            self._hold(tokens[taken:])

    def finish(self, pieces: int) -> None:
        """There are no more than so many pieces; what is left becomes the last shard."""
        if self._held:
            self._write(pieces, 0)

    def _hold(self, tokens: UInt[np.ndarray, " n"]) -> None:
        self._parts.append(tokens)
        self._held += len(tokens)

    def _write(self, piece: int, offset: int) -> None:
        content = np.concatenate(self._parts).astype(self._dtype).tobytes()
        number = len(self.shards)
        atomic_write(shard_path(self._folder, self._split, number), content)
        digest = hashlib.blake2b(content, digest_size=32).hexdigest()
        self.shards.append(Shard(tokens=self._held, blake2b=digest))
        self._parts, self._held = [], 0
        self._note(Finished(self._split, number, self.shards[-1], piece, offset))


class ShardReader:
    """Tokens of shards by their place, from files that are mapped into memory when needed.

    A map holds a file descriptor, so at most `max_maps` are kept: half of what the process may
    open. Files that are mapped stay as they are even if a new build replaces them, which are all
    of a folder with no more files than that. Of a larger one, a file that was replaced is refused.

    Args:
        paths: of the shards, which exist.
        dtype: of tokens.
    """

    def __init__(self, paths: Sequence[Path], dtype: np.dtype):
        self._paths, self._dtype = paths, dtype
        self.max_maps = _max_maps()
        self._known = [_identity(path.stat()) for path in paths]
        self._maps: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()
        self._guard = threading.Lock()
        for number in range(min(len(paths), self.max_maps)):
            self.tokens(number)

    def tokens(self, number: int) -> UInt[np.ndarray, " n"]:
        """All tokens of a shard; the map that was not used for longest makes room for it.

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
                if _identity(os.fstat(file.fileno())) != self._known[number]:
                    raise ArgumentError(
                        "a shard was replaced while it was in use",
                        got=path,
                        expected="the file that was there when reading began",
                        fix="start again; build other data in another folder",
                    )
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[number] = np.frombuffer(mapped, self._dtype)
            return self._maps[number]


def _max_maps() -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_MAPS if limit == resource.RLIM_INFINITY else max(1, min(MAX_MAPS, limit // 2))


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_ino, status.st_mtime_ns


def fault_of(path: Path, shard: Shard, itemsize: int, verify: Verify) -> str | None:
    """What is wrong with the file of a shard, or None.

    Args:
        path: where it should be.
        shard: what it should hold.
        itemsize: bytes of a token.
        verify: `size` looks at the file's size; `full` reads it all.
    """
    if path.is_symlink() or not path.is_file():
        is_there = path.is_symlink() or path.exists()
        return "no regular file" if is_there else "missing"
    size, expected = path.stat().st_size, shard.tokens * itemsize
    if size != expected:
        kind = "truncated" if size < expected else "too large"
        return f"{kind}: {size:,} bytes, {expected:,} were written"
    if verify == "full":
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        if digest.hexdigest() != shard.blake2b:
            return "damaged: its bytes are not those that were written"
    return None


def require_sound(path: Path, shard: Shard, itemsize: int, verify: Verify) -> None:
    """Raise what is wrong with the file of a shard."""
    fault = fault_of(path, shard, itemsize, verify)
    if fault is not None:
        raise ArgumentError(
            f"a shard is {fault.partition(':')[0]}",
            got=f"{path}: {fault}",
            expected=f"{shard.tokens:,} tokens of {itemsize} bytes",
            fix=AGAIN,
        )
