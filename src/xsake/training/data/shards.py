"""Files of tokens: written whole with their digests, and checked before they are believed."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt

from xsake.bench.whole_file import write_whole
from xsake.errors import ArgumentError
from xsake.training.data.index import AGAIN, Shard, Split, shard_path

Verify = Literal["size", "full"]


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
        write_whole(shard_path(self._folder, self._split, number), content)
        digest = hashlib.blake2b(content, digest_size=32).hexdigest()
        self.shards.append(Shard(tokens=self._held, blake2b=digest))
        self._parts, self._held = [], 0
        self._note(Finished(self._split, number, self.shards[-1], piece, offset))


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
