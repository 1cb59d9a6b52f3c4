"""The windows of a split: equal cuts of its stream of tokens, read from files by number."""

import logging
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from xsake.errors import ArgumentError
from xsake.training.data.index import AGAIN, BYTES_OF, Split, read_index, shard_path
from xsake.training.data.shards import ShardReader, Verify, require_sound
from xsake.training.data.verifying import Verifier

_LOG = logging.getLogger(__name__)


class Windows:
    """Windows of `context + 1` tokens that begin every `context` tokens.

    The last token of a window is the first of the next: each is predicted once. What is left at
    the end and fills no window is not read.

    Args:
        folder: as `xsake data build` makes it.
        context: tokens that a model reads of a window.
        split: which documents.
        verify: `size` checks that every file is there and has its size; `full` compares the digest
            of a file too when it is first used, see `Verifier`.
        vocabulary: tokens that the model knows; None: whatever the data has.
    """

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        split: Split = "train",
        verify: Verify = "size",
        vocabulary: int | None = None,
    ):
        if context < 1:
            raise ArgumentError("a window reads no token", got=context, expected="at least 1")
        self.index = read_index(folder)
        self.context, self.split = context, split
        self._folder = folder
        if vocabulary is not None:
            self._require_known(vocabulary)
        shards = self.index.split(split).shards
        paths = [shard_path(folder, split, number) for number in range(len(shards))]
        itemsize = BYTES_OF[self.index.dtype]
        for path, shard in zip(paths, shards, strict=True):
            require_sound(path, shard, itemsize, "size")
        check = lambda number: require_sound(paths[number], shards[number], itemsize, "full")
        self._verifier = Verifier(check) if verify == "full" else None
        stored = np.dtype(f"<u{itemsize}")
        self._reader = ShardReader(paths, stored)
        self._count = max(0, (self.index.split(split).tokens - 1) // context)
        if not self._count:
            raise ArgumentError(
                "the data does not fill a single window",
                got=f"{self.index.split(split).tokens:,} tokens in {split} of {folder}",
                expected=f"more than the context of {context:,}",
                fix="take a smaller context or more texts",
            )

    def __len__(self) -> int:
        return self._count

    def read(self, numbers: Int64[np.ndarray, " B"]) -> Int32[np.ndarray, "B n"]:
        """The tokens of windows.

        Args:
            numbers: of the windows, each below `len(self)`.

        Returns:
            A row of `context + 1` tokens for each.
        """
        if self._verifier is not None:
            self._verifier.use(self._shards_of(numbers))
        found = np.empty((len(numbers), self.context + 1), np.int32)
        for row, number in zip(found, numbers.tolist(), strict=True):
            self._copy(number * self.context, row)
        known = self.index.tokenizer.vocabulary
        if found.size and not 0 <= found.min() <= found.max() < known:
            row = int(((found < 0) | (found >= known)).any(axis=1).argmax())
            raise ArgumentError(
                "the data holds a token that its tokenizer does not have",
                got=f"window {numbers[row]} of {self.split} in {self._folder}",
                expected=f"ids below {known}",
                fix=AGAIN,
            )
        return found

    def close(self) -> None:
        """End the comparison of digests."""
        if self._verifier is not None and (left := self._verifier.close()):
            _LOG.warning("%d files of %s were read and not compared", left, self._folder)

    def _shards_of(self, numbers: Int64[np.ndarray, " B"]) -> list[int]:
        """Return the numbers of the files that hold windows."""
        first = numbers * self.context // self.index.shard_tokens
        last = (numbers + 1) * self.context // self.index.shard_tokens
        pairs = zip(first.tolist(), last.tolist(), strict=True)
        return sorted({number for begin, end in pairs for number in range(begin, end + 1)})

    def _copy(self, start: int, row: Int32[np.ndarray, " n"]) -> None:
        """Fill a row with what stands at a place of the stream, from as many files as it takes."""
        number, begin = divmod(start, self.index.shard_tokens)
        done = 0
        while done < len(row):
            part = self._reader.tokens(number)[begin : begin + len(row) - done]
            row[done : done + len(part)] = part
            done, number, begin = done + len(part), number + 1, 0

    def _require_known(self, vocabulary: int) -> None:
        if self.index.tokenizer.vocabulary > vocabulary:
            raise ArgumentError(
                "the data has tokens that the model does not know",
                got=f"{self.index.tokenizer.vocabulary:,} tokens in {self._folder}",
                expected=f"at most the model's vocabulary of {vocabulary:,}",
                fix="build the data with the model's own tokenizer, or give the model more tokens",
            )
