"""Training data: token files with an index, read as windows in a reproducible order."""

import functools
import hashlib
import json
import logging
import math
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pydantic
from jaxtyping import Int32, Int64, UInt, UInt64
from pydantic import Field

from xsake import _json
from xsake._schema import Count, Fraction, Frozen, Positive, Text, validate
from xsake.errors import ArgumentError, MissingExtraError
from xsake.evaluation.record import TextFile
from xsake.model.tokenizer import TOKENIZER

INDEX, BUILD_LOG = "index.json", "building.jsonl"
MAX_BYTES, MAX_CONTAINERS = 2**26, 2**20
MAX_MAPS = 2**14  # of files in memory; the default limit of a process is 65,530
MAX_POSITION = 2**62  # beyond any run; arithmetic on positions fits int64
ITEMSIZE = {"uint16": 2, "uint32": 4}
REBUILD_FIX = "copy the folder again, or rebuild it with `xsake data build --no-resume`"

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Verify = Literal["full", "size"]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

_LOG = logging.getLogger(__name__)
_ROUNDS = 4
_SPLITMIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # finalizer of splitmix64
_LABELS = {"data": "the data", "context": "the context", "seed": "the seed"}


class Shard(Frozen):
    """File of tokens; its position in the list is its number."""

    tokens: Positive
    blake2b: Digest


class SplitIndex(Frozen):
    """Tokens of a split, in shards of equal size."""

    documents: Count
    tokens: Count
    shards: tuple[Shard, ...]


class Splits(Frozen):
    """Train and validation; every document is in one of them."""

    train: SplitIndex
    validation: SplitIndex


class TokenizerIdentity(Frozen):
    """Tokenizer of the data; its file is in the folder of the index."""

    sha256: Digest = Field(description="of tokenizer.json")
    vocabulary: Positive = Field(description="largest token ID + 1")
    end_token: Text = Field(description="appended to every document")
    end_id: Count
    asked_vocabulary: Positive | None = Field(
        description="requested size, if it was trained on the train split"
    )


class SkippedDocuments(Frozen):
    """Unusable documents of a text file, skipped on request."""

    name: str = Field(description="of the file")
    documents: Positive
    first: Text = Field(description="location and problem of the first one")


class DataIndex(Frozen):
    """Output of `xsake data build` and everything it was built from."""

    schema_version: Literal[1] = 1
    recipe: Digest = Field(description="of texts, tokenizer and settings")
    tokenizer: TokenizerIdentity
    dtype: Literal["uint16", "uint32"] = Field(
        description="of the shards, little-endian, no header"
    )
    shard_tokens: Positive = Field(description="of every shard except the last of its split")
    validation: Fraction = Field(description="share of documents, chosen by a hash of their text")
    splits: Splits
    sources: tuple[TextFile, ...]
    skipped: tuple[SkippedDocuments, ...] = ()
    versions: dict[str, str]

    def to_json(self) -> str:
        """Return the content of the file; version 0.1.0 reads it if no document was skipped."""
        return self.model_dump_json(indent=1, exclude=None if self.skipped else {"skipped"})

    @pydantic.model_validator(mode="after")
    def _check_consistency(self) -> "DataIndex":
        for name in SPLITS:
            split = self.split(name)
            if split.tokens != sum(shard.tokens for shard in split.shards):
                raise ValueError(f"{name}: the shards do not add up to {split.tokens} tokens")
            if any(shard.tokens != self.shard_tokens for shard in split.shards[:-1]):
                raise ValueError(f"{name}: a shard before the last is not full")
            if split.shards and split.shards[-1].tokens > self.shard_tokens:
                raise ValueError(f"{name}: the last shard is too large")
        if self.tokenizer.vocabulary > 2 ** (8 * ITEMSIZE[self.dtype]):
            raise ValueError(f"{self.dtype} does not hold {self.tokenizer.vocabulary} tokens")
        if self.tokenizer.end_id >= self.tokenizer.vocabulary:
            raise ValueError("the end token is not in the vocabulary")
        return self

    def split(self, name: Split) -> SplitIndex:
        """Return one of the two splits."""
        return self.splits.train if name == "train" else self.splits.validation

    def digest(self, name: Split) -> str:
        """Return a digest of the tokens of a split."""
        parts = [self.dtype, [shard.model_dump() for shard in self.split(name).shards]]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def read_index(folder: Path) -> DataIndex:
    """Read the index of a folder from `xsake data build`; raise if the build is not complete."""
    path = folder / INDEX
    if not path.exists() and (folder / BUILD_LOG).exists():
        fix = "repeat the same `xsake data build` command; it resumes the build"
        got = f"{folder} has {BUILD_LOG} and no {INDEX}"
        raise ArgumentError(
            "data-interrupted", "the build of the data was interrupted", got=got, fix=fix
        )
    if not path.exists():
        got = folder if folder.is_dir() else f"{folder}, not a folder"
        fix, expected = "create it with `xsake data build`", f"a folder with {INDEX}"
        raise ArgumentError(
            "no-data", "the folder has no data", got=got, expected=expected, fix=fix
        )
    what = f"an index of tokens: {path}"
    data = _json.read(path, max_bytes=MAX_BYTES)
    document = _json.loads(data, what=what, max_bytes=MAX_BYTES, max_containers=MAX_CONTAINERS)
    return validate(DataIndex, document, what=what)


def write_index(folder: Path, index: DataIndex) -> None:
    """Write the index, the last step of a build."""
    _json.write(folder / INDEX, index.to_json() + "\n", max_bytes=MAX_BYTES)


def require_tokenizer(folder: Path, index: DataIndex) -> None:
    """Raise if the tokenizer.json in a data folder is not that of its tokens."""
    path, expected = folder / TOKENIZER, f"sha256 {index.tokenizer.sha256}, as in {INDEX}"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != index.tokenizer.sha256:
        got, what = f"{path} with sha256 {digest}", "the tokenizer does not match the tokens"
        raise ArgumentError("data-tokenizer", what, got=got, expected=expected, fix=REBUILD_FIX)


def shard_path(folder: Path, split: Split, number: int) -> Path:
    """Return the path of a shard; the index has no file names, so it cannot point elsewhere."""
    return folder / f"{split}-{number:05d}.bin"


def require_intact(path: Path, shard: Shard, itemsize: int, verify: Verify) -> None:
    """Raise if the file of a shard is missing or damaged; `full` compares its digest."""
    problem, size, expected = None, 0, shard.tokens * itemsize
    if path.is_symlink() or not path.is_file():
        problem = "not a regular file" if path.is_symlink() or path.exists() else "missing"
    elif (size := path.stat().st_size) != expected:
        problem = "truncated" if size < expected else "too large"
    elif verify == "full":
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        problem = None if digest.hexdigest() == shard.blake2b else "damaged"
    if problem is not None:
        raise ArgumentError(
            "shard",
            f"a shard is {problem}",
            got=f"{path}: {problem}, {size:,} bytes",
            expected=f"{shard.tokens:,} tokens of {itemsize} bytes with the digest in {INDEX}",
            fix=REBUILD_FIX,
        )


class Verifier:
    """Verification of files in threads, each once, on first use.

    Windows are read in random order, so the first batches touch nearly every file. A batch waits
    for its files, but all batches together at most `wait_seconds`; afterwards files are verified
    while training continues, and a damaged one raises at the next use of any file.
    """

    def __init__(self, check: Callable[[int], None], *, wait_seconds: float = 30.0):
        self._check, self._left = check, wait_seconds
        self._jobs: dict[int, futures.Future[None]] = {}
        self._failure: Exception | None = None
        self._pool = futures.ThreadPoolExecutor(min(4, os.cpu_count() or 1), "verify")

    def use(self, numbers: Sequence[int]) -> None:
        """Start to verify new files, wait while time is left, and raise for damaged ones."""
        for number in numbers:
            if number not in self._jobs:
                self._jobs[number] = self._pool.submit(self._run, number)
        if self._left > 0:
            started = time.monotonic()
            futures.wait([self._jobs[number] for number in numbers], timeout=self._left)
            self._left -= time.monotonic() - started
        if self._failure is not None:
            raise self._failure

    def close(self) -> int:
        """Stop verifying; return the number of files that were used but not verified."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return sum(job.cancelled() for job in self._jobs.values())

    def _run(self, number: int) -> None:
        try:
            self._check(number)
        except Exception as error:  # noqa: BLE001 - raised by the thread that uses the file
            self._failure = self._failure or error


class Windows:
    """Windows of `context + 1` tokens at multiples of `context`.

    The last token of a window is the first of the next one, so each token is predicted once. An
    incomplete window at the end is not read. Files are mapped into memory, at most half as many as
    the process may open; a mapped file keeps its content even if a new build replaces it.

    Args:
        folder: from `xsake data build`; all others as for `TokenLoader`.
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
            raise ArgumentError(
                "context-size", "the context is not positive", got=context, expected="at least 1"
            )
        self.index, self.context, self.split = read_index(folder), context, split
        self._folder, self._vocabulary = folder, self.index.tokenizer.vocabulary
        if vocabulary is not None and self._vocabulary > vocabulary:
            raise ArgumentError(
                "data-vocabulary",
                "the vocabulary of the data is larger than that of the model",
                got=f"{self._vocabulary:,} tokens in {folder}",
                expected=f"at most the model's vocabulary of {vocabulary:,}",
                fix="build the data with the model's tokenizer, or enlarge the model's vocabulary",
            )
        num_tokens, shards = self.index.split(split).tokens, self.index.split(split).shards
        self._count = (num_tokens - 1) // context
        if self._count < 1:
            raise ArgumentError(
                "data-length",
                "the data has less than one window",
                got=f"{num_tokens:,} tokens in {split} of {folder}",
                expected=f"more than the context of {context:,}",
                fix="use a smaller context or more texts",
            )
        self._paths = [shard_path(folder, split, number) for number in range(len(shards))]
        self._dtype = np.dtype(f"<u{ITEMSIZE[self.index.dtype]}")
        check = lambda level, number: require_intact(
            self._paths[number], shards[number], self._dtype.itemsize, level
        )
        for number in range(len(shards)):
            check("size", number)
        self._verifier = Verifier(functools.partial(check, "full")) if verify == "full" else None
        self._identities = [_identity(path.stat()) for path in self._paths]
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limit = MAX_MAPS if limit == resource.RLIM_INFINITY else min(MAX_MAPS, limit // 2)
        # The least recently used map is dropped, and closed when its last reader is done.
        self._tokens = functools.lru_cache(max(1, limit))(self._map)
        for number in range(min(len(shards), limit)):
            self._tokens(number)

    def __len__(self) -> int:
        return self._count

    def read(self, window_ids: Int64[np.ndarray, " B"]) -> Int32[np.ndarray, "B n"]:
        """Return a row of `context + 1` tokens for each window, all below `len(self)`."""
        if self._verifier is not None:
            self._verifier.use(self._find_shards(window_ids))
        tokens = np.empty((len(window_ids), self.context + 1), np.int32)
        for row, window in zip(tokens, window_ids.tolist(), strict=True):
            number, begin = divmod(window * self.context, self.index.shard_tokens)
            done = 0
            while done < len(row):
                part = self._tokens(number)[begin : begin + len(row) - done]
                row[done : done + len(part)] = part
                done, number, begin = done + len(part), number + 1, 0
        is_outside = (tokens < 0) | (tokens >= self._vocabulary)
        if is_outside.any():
            window = window_ids[is_outside.any(axis=1).argmax()]
            raise ArgumentError(
                "data-token",
                "the data has a token outside the vocabulary of its tokenizer",
                got=f"window {window} of {self.split} in {self._folder}",
                expected=f"ids below {self._vocabulary}",
                fix=REBUILD_FIX,
            )
        return tokens

    def close(self) -> None:
        """Stop verifying digests, and close all files."""
        self._tokens.cache_clear()
        if self._verifier is not None and (num_unverified := self._verifier.close()):
            _LOG.warning("%d files of %s were read but not verified", num_unverified, self._folder)

    def _find_shards(self, window_ids: Int64[np.ndarray, " B"]) -> list[int]:
        """Return the numbers of the files that hold windows."""
        first = window_ids * self.context // self.index.shard_tokens
        last = (window_ids + 1) * self.context // self.index.shard_tokens
        pairs = zip(first.tolist(), last.tolist(), strict=True)
        return sorted({number for begin, end in pairs for number in range(begin, end + 1)})

    def _map(self, number: int) -> UInt[np.ndarray, " n"]:
        """Map a shard; raise if it is not the file from when the folder was opened."""
        path = self._paths[number]
        with path.open("rb", buffering=0) as file:
            if _identity(os.fstat(file.fileno())) != self._identities[number]:
                what, fix = "a shard was replaced while it was in use", "restart the run"
                expected = "the file from when the folder was opened; other data in another folder"
                raise ArgumentError("shard-replaced", what, got=path, expected=expected, fix=fix)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), self._dtype)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_ino, status.st_mtime_ns


def positions_to_windows(
    positions: Int64[np.ndarray, " n"], *, windows: int, seed: int
) -> Int64[np.ndarray, " n"]:
    """Return the window at each position of an endless run; an epoch is `windows` positions.

    The order is part of the checkpoint format and does not change between versions. It is not that
    of Grain's shuffle, whose seed s + 1 in epoch 0 repeats seed s in epoch 1.

    Example:
        >>> first = positions_to_windows(np.arange(5), windows=5, seed=1)
        >>> sorted(first.tolist())
        [0, 1, 2, 3, 4]
    """
    epochs, offsets = np.divmod(positions, windows)
    permuted = np.empty_like(positions)
    for epoch in np.unique(epochs):
        is_epoch = epochs == epoch
        permuted[is_epoch] = permute(offsets[is_epoch], size=windows, seed=seed, epoch=int(epoch))
    return permuted


def permute(
    indices: Int64[np.ndarray, " n"], *, size: int, seed: int, epoch: int
) -> Int64[np.ndarray, " n"]:
    """Apply the permutation of `range(size)` of a seed and an epoch, without storing it.

    An index is a row and a column of the smallest table that holds all of them. In turn, each is
    shifted by a hash of the other (a Feistel network). Results beyond `size` are permuted again.
    """
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=_ROUNDS * 2 * 8).digest()
    keys = np.frombuffer(digest, "<u8").astype(np.uint64).reshape(_ROUNDS, 2)
    columns = math.isqrt(size - 1) + 1
    num_rows, num_columns = np.uint64(-(-size // columns)), np.uint64(columns)
    permuted, pending = indices.astype(np.uint64), np.arange(len(indices))
    while pending.size:
        row, column = np.divmod(permuted[pending], num_columns)
        for row_key, column_key in keys:
            column = (column + _mix(row + column_key) % num_columns) % num_columns
            row = (row + _mix(column + row_key) % num_rows) % num_rows
        permuted[pending] = row * num_columns + column
        pending = pending[permuted[pending] >= size]
    return permuted.astype(np.int64)


def _mix(values: UInt64[np.ndarray, " n"]) -> UInt64[np.ndarray, " n"]:
    for shift, factor in _SPLITMIX:
        values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)  # wraps around
    return values ^ (values >> np.uint64(31))


class Batch(NamedTuple):
    """Batch of one process in one step.

    Args:
        tokens: a window of `context + 1` tokens per row.
        windows: indices of the windows in their split.
    """

    tokens: Int32[np.ndarray, "B n"]
    windows: Int64[np.ndarray, " B"]


class LoaderState(Frozen):
    """Position of a loader, and all settings that determine its batches except the processes."""

    version: Literal[1] = 1
    step: Count
    seed: int
    batch: Count
    context: Count
    split: Split
    data: str


class TokenLoader:
    """Endless iterator of batches from a data folder.

    The batch of a step is a function of files, seed and step only. Every epoch reads every window
    once, in a new order; a batch may span two epochs. Process p of n reads rows `p * batch / n` to
    `(p + 1) * batch / n` only.

    Args:
        folder: from `xsake data build`.
        context: input tokens per window.
        batch: windows per step, over all processes.
        seed: of the shuffle.
        process: index of this process.
        processes: number of processes.
        split: which documents.
        verify: `size` checks the sizes of all files; `full` also verifies the digest of a file on
            first use, see `Verifier`.
        vocabulary: size of the model's vocabulary; None: not checked.
        prefetch: number of batches to read ahead in a thread; 0: none.
    """

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        batch: int,
        seed: int,
        process: int = 0,
        processes: int = 1,
        split: Split = "train",
        verify: Verify = "size",
        vocabulary: int | None = None,
        prefetch: int = 2,
    ):
        if batch < 1 or processes < 1 or batch % processes:
            what = "the batch is not divisible by the number of processes"
            raise ArgumentError(
                "batch-processes", what, got=f"a batch of {batch} windows for {processes} processes"
            )
        if not 0 <= process < processes:
            what, expected = "the process index is out of range", f"0 to {processes - 1}"
            raise ArgumentError("process-index", what, got=process, expected=expected)
        if prefetch < 0:
            raise ArgumentError("prefetch", "prefetch is negative", got=prefetch, expected=">= 0")
        self.windows = Windows(
            folder, context=context, split=split, verify=verify, vocabulary=vocabulary
        )
        self._start = LoaderState(
            step=0, seed=seed, batch=batch, context=context, split=split,
            data=self.windows.index.digest(split),
        )  # fmt: skip
        self._step, num_rows = 0, batch // processes
        self._rows = slice(process * num_rows, (process + 1) * num_rows)
        grain = _import_grain()
        # One thread is fast enough and keeps the order of reads on the disk.
        options = grain.ReadOptions(num_threads=min(prefetch, 1), prefetch_buffer_size=prefetch)
        steps = grain.MapDataset.range(MAX_POSITION // batch)
        self._batches = iter(steps.map(self._read).to_iter_dataset(options))

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._batches)
        except BaseException:
            # Grain has dropped the failed batch; read it again next time.
            self._batches.set_state({"next_index": self._step})
            raise
        self._step += 1
        return batch

    def window_ids(self, step: int) -> Int64[np.ndarray, " B"]:
        """Return the windows of a step's whole batch, over all processes."""
        positions = step * self._start.batch + np.arange(self._start.batch, dtype=np.int64)
        return positions_to_windows(positions, windows=len(self.windows), seed=self._start.seed)

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: after n batches, batch n is next."""
        return self._start.model_copy(update={"step": self._step}).model_dump(mode="json")

    def restore(self, state: dict[str, Any]) -> None:
        """Continue at a `state` of the same batches, with any number of processes."""
        restored = validate(LoaderState, state, what="a checkpoint: invalid state of its data")
        for name, expected in self._start:
            value = getattr(restored, name)
            if name != "step" and value != expected:
                raise ArgumentError(
                    "loader-state",
                    f"the state is of other batches: {_LABELS.get(name, name)} differs",
                    got=f"{name} {value}",
                    expected=f"{name} {expected}",
                    fix="resume with the settings and the data of the interrupted run",
                )
        if restored.step > MAX_POSITION // self._start.batch:
            raise ArgumentError(
                "loader-step", "the step of the loader is out of range", got=restored.step
            )
        self._batches.set_state({"next_index": restored.step})
        self._step = restored.step

    def close(self) -> None:
        """Stop reading ahead; there are no more batches."""
        self._batches.close()
        self.windows.close()

    def _read(self, step: int) -> Batch:
        window_ids = self.window_ids(step)[self._rows]
        return Batch(self.windows.read(window_ids), window_ids)


def _import_grain() -> ModuleType:
    try:
        import grain
    except ModuleNotFoundError as missing:
        what, fix = "the loader needs the package grain", 'pip install "xsake[train]"'
        raise MissingExtraError("grain", what, got=missing.name, fix=fix) from missing
    return grain
