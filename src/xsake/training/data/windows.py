"""Windows of a split: equal cuts of its tokens, read from files by index."""

import logging
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from xsake.errors import ArgumentError
from xsake.training.data.index import ITEMSIZE, REBUILD_FIX, Split, read_index, shard_path
from xsake.training.data.shards import ShardReader, Verify, require_intact
from xsake.training.data.verifying import Verifier

_LOG = logging.getLogger(__name__)


class Windows:
    """Windows of `context + 1` tokens at multiples of `context`.

    The last token of a window is the first of the next one, so each token is predicted once. An
    incomplete window at the end is not read.

    Args:
        folder: from `xsake data build`.
        context: input tokens per window.
        split: which documents.
        verify: `size` checks the sizes of all files; `full` also verifies the digest of a file on
            first use, see `Verifier`.
        vocabulary: size of the model's vocabulary; None: not checked.
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
            raise ArgumentError("the context is not positive", got=context, expected="at least 1")
        self.index = read_index(folder)
        self.context, self.split = context, split
        self._folder = folder
        if vocabulary is not None:
            self._require_vocabulary(vocabulary)
        shards = self.index.split(split).shards
        paths = [shard_path(folder, split, number) for number in range(len(shards))]
        itemsize = ITEMSIZE[self.index.dtype]
        for path, shard in zip(paths, shards, strict=True):
            require_intact(path, shard, itemsize, "size")
        check = lambda number: require_intact(paths[number], shards[number], itemsize, "full")
        self._verifier = Verifier(check) if verify == "full" else None
        stored = np.dtype(f"<u{itemsize}")
        self._reader = ShardReader(paths, stored)
        self._count = max(0, (self.index.split(split).tokens - 1) // context)
        if not self._count:
            raise ArgumentError(
                "the data has less than one window",
                got=f"{self.index.split(split).tokens:,} tokens in {split} of {folder}",
                expected=f"more than the context of {context:,}",
                fix="use a smaller context or more texts",
            )

    def __len__(self) -> int:
        return self._count

    def read(self, window_ids: Int64[np.ndarray, " B"]) -> Int32[np.ndarray, "B n"]:
        """Return the tokens of windows.

        Args:
            window_ids: each below `len(self)`.

        Returns:
            A row of `context + 1` tokens for each window.
        """
        if self._verifier is not None:
            self._verifier.use(self._find_shards(window_ids))
        tokens = np.empty((len(window_ids), self.context + 1), np.int32)
        for row, number in zip(tokens, window_ids.tolist(), strict=True):
            self._copy(number * self.context, row)
        vocabulary_size = self.index.tokenizer.vocabulary
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary_size:
            row = int(((tokens < 0) | (tokens >= vocabulary_size)).any(axis=1).argmax())
            raise ArgumentError(
                "the data has a token outside the vocabulary of its tokenizer",
                got=f"window {window_ids[row]} of {self.split} in {self._folder}",
                expected=f"ids below {vocabulary_size}",
                fix=REBUILD_FIX,
            )
        return tokens

    def close(self) -> None:
        """Stop verifying digests."""
        if self._verifier is not None and (num_unverified := self._verifier.close()):
            _LOG.warning("%d files of %s were read but not verified", num_unverified, self._folder)

    def _find_shards(self, window_ids: Int64[np.ndarray, " B"]) -> list[int]:
        """Return the numbers of the files that hold windows."""
        first = window_ids * self.context // self.index.shard_tokens
        last = (window_ids + 1) * self.context // self.index.shard_tokens
        pairs = zip(first.tolist(), last.tolist(), strict=True)
        return sorted({number for begin, end in pairs for number in range(begin, end + 1)})

    def _copy(self, start: int, row: Int32[np.ndarray, " n"]) -> None:
        """Fill a row with the tokens from an offset of the split, across files."""
        number, begin = divmod(start, self.index.shard_tokens)
        done = 0
        while done < len(row):
            part = self._reader.tokens(number)[begin : begin + len(row) - done]
            row[done : done + len(part)] = part
            done, number, begin = done + len(part), number + 1, 0

    def _require_vocabulary(self, vocabulary: int) -> None:
        if self.index.tokenizer.vocabulary > vocabulary:
            raise ArgumentError(
                "the vocabulary of the data is larger than that of the model",
                got=f"{self.index.tokenizer.vocabulary:,} tokens in {self._folder}",
                expected=f"at most the model's vocabulary of {vocabulary:,}",
                fix="build the data with the model's tokenizer, or enlarge the model's vocabulary",
            )
