"""Build a data folder from texts: token shards and an index. Interrupted builds can be resumed."""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import UInt

import xsake
from xsake._io import JsonlLog, atomic_write
from xsake._schema import Count, Frozen
from xsake.errors import ArgumentError, MissingExtraError
from xsake.model.tokenizer import TOKENIZER, Tokenizer
from xsake.model.tokenizer_file import library_errors
from xsake.training import data
from xsake.training.corpus import MAX_PIECE_CHARS, ChangedTextError, Corpus, OnInvalid, Piece
from xsake.training.data import BUILD_LOG, INDEX, SPLITS, DataIndex, Shard, Split, write_index

SHARD_TOKENS, MAX_SHARD_TOKENS = 2**26, 2**30
END_TOKEN = "<|endoftext|>"
MIN_VOCABULARY, MAX_VOCABULARY = 257, 2**24  # 256 bytes and the end token
MAX_WORD_CHARS = 1000  # training time is quadratic in the length of a word
TOKENIZER_CONFIG = "tokenizer_config.json"

_LONG_RUN = re.compile(rf"\S{{{MAX_WORD_CHARS}}}|\s{{{MAX_WORD_CHARS}}}")
_NAMES = "|".join(re.escape(name) for name in (INDEX, BUILD_LOG, TOKENIZER, TOKENIZER_CONFIG))
_BUILD_FILES = rf"(?:{_NAMES}|(?:train|validation)-\d{{5,}}\.bin)"
_TEMPORARY = rf"\.{_BUILD_FILES}\.[a-z0-9_]{{8}}"  # of a killed process


@dataclasses.dataclass(frozen=True)
class BuildSettings:
    """Settings of a build.

    Args:
        shard_tokens: tokens of every shard except the last.
        validation: share of documents in the validation split.
        end_token: appended to every document; None: that of the tokenizer.
        invalid: "refuse" raises for an unusable document, such as one that is not UTF-8; "skip"
            omits and counts it.
    """

    shard_tokens: int = SHARD_TOKENS
    validation: float = 0.01
    end_token: str | None = None
    invalid: OnInvalid = "refuse"

    def __post_init__(self):
        _require_range("the size of a shard", self.shard_tokens, 1, MAX_SHARD_TOKENS)
        _require_range("the validation share", self.validation, 0, math.nextafter(1, 0))


@dataclasses.dataclass(frozen=True)
class NewTokenizer:
    """Byte-level BPE tokenizer to train on the texts of the build.

    Args:
        vocabulary: maximum number of tokens, including 256 bytes and the end token.
    """

    vocabulary: int

    def __post_init__(self):
        _require_range("the vocabulary size", self.vocabulary, MIN_VOCABULARY, MAX_VOCABULARY)


class FinishedShard(Frozen):
    """Written shard, and its end in the texts."""

    split: Split
    number: Count
    shard: Shard
    piece: Count  # in which it ends
    offset: Count  # tokens of that piece up to the end of the shard


@dataclasses.dataclass(frozen=True)
class BuildProgress:
    """Progress of a build, in pieces of text."""

    doing: str
    done: int = 0
    total: int = 0
    tokens: int = 0
    remaining_seconds: float | None = None  # None while unknown
    finished: FinishedShard | None = None  # shard that was just written


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """Index of a build, and numbers of shards of an earlier build."""

    index: DataIndex
    kept: int
    rewritten: int
    is_new: bool = True  # whether anything was missing


BuildCallback = Callable[[BuildProgress], None]


def build(
    tokenizer: Path | NewTokenizer,
    texts: Sequence[Path],
    folder: Path,
    settings: BuildSettings | None = None,
    *,
    overwrite: bool = False,
    on_progress: BuildCallback = lambda progress: None,
) -> BuildResult:
    """Tokenize texts into a folder for `TokenLoader`.

    The same texts, tokenizer and settings give the same bytes. The folder is readable only after
    the build has finished; calling this again resumes an interrupted build.

    Args:
        tokenizer: folder of a checkpoint or its tokenizer.json, or a tokenizer to train.
        texts: files and folders, as for `xsake.evaluation.read_texts`.
        folder: new or empty, or of an earlier build of the same data.
        settings: of the build.
        overwrite: discard an earlier build in the folder.
        on_progress: called with the progress.
    """
    settings, source = settings or BuildSettings(), tokenizer
    if isinstance(source, Path):
        source = TokenizerFile.from_checkpoint(source, settings.end_token)
    elif settings.end_token is not None:
        what, got = "a new tokenizer has a fixed end token", f"--end-token {settings.end_token}"
        raise ArgumentError("end-token-fixed", what, got=got, fix="remove --end-token")
    on_file = lambda name: on_progress(BuildProgress(f"reading {name}"))
    corpus = Corpus(texts, settings.validation, on_file, invalid=settings.invalid)
    recipe = _recipe(source, corpus, settings)
    index = _prepare_folder(folder, recipe, overwrite=overwrite)
    if index is not None:
        for name in SPLITS:
            for number, shard in enumerate(index.split(name).shards):
                path = data.shard_path(folder, name, number)
                _verify(path, shard, data.ITEMSIZE[index.dtype], on_progress)
        kept = sum(len(index.split(name).shards) for name in SPLITS)
        return BuildResult(index, kept=kept, rewritten=0, is_new=False)
    log = BuildLog(folder)
    try:
        return _resume(folder, recipe, source, corpus, settings, log, on_progress)
    except ChangedTextError:
        log.remove()  # its shards may contain text that has changed
        raise


def _resume(
    folder: Path,
    recipe: str,
    source: "TokenizerFile | NewTokenizer",
    corpus: Corpus,
    settings: BuildSettings,
    log: "BuildLog",
    on_progress: BuildCallback,
) -> BuildResult:
    """Write what is missing: the tokenizer, shards after the last intact one, the index."""
    if log.recipe is None:
        log.add("start", recipe=recipe)
    requested = source.vocabulary if isinstance(source, NewTokenizer) else None
    if isinstance(source, NewTokenizer):
        path = folder / TOKENIZER  # of an earlier run, if it has the digest in the log
        trained = TokenizerFile(path.read_bytes() if path.is_file() else b"", END_TOKEN)
        if trained.sha256 != log.tokenizer:
            on_progress(BuildProgress(f"training a tokenizer of {source.vocabulary:,} tokens"))
            trained = TokenizerFile.train(corpus.training_texts(), source.vocabulary)
        source = trained
    source.install(folder)
    log.add("tokenizer", sha256=source.sha256)
    vocabulary, writers, num_recorded, num_kept = Vocabulary(folder), {}, 0, 0
    for split, recorded in log.shards.items():
        intact = _find_intact(folder, recorded, vocabulary.dtype.itemsize, on_progress)
        num_recorded, num_kept = num_recorded + len(recorded), num_kept + len(intact)
        writers[split] = ShardWriter(folder, vocabulary.dtype, settings.shard_tokens, split, intact)
    _write_shards(corpus, vocabulary, writers, log, on_progress)
    identity = data.TokenizerIdentity(
        sha256=source.sha256, vocabulary=vocabulary.size, end_token=source.end_token,
        end_id=vocabulary.end_id, asked_vocabulary=requested,
    )  # fmt: skip
    splits = {
        split: data.SplitIndex(
            documents=corpus.documents[split], tokens=writer.tokens, shards=tuple(writer.shards)
        )
        for split, writer in writers.items()
    }
    index = DataIndex(
        recipe=recipe,
        tokenizer=identity,
        dtype="uint16" if vocabulary.dtype.itemsize == data.ITEMSIZE["uint16"] else "uint32",
        shard_tokens=settings.shard_tokens,
        validation=settings.validation,
        splits=data.Splits(**splits),
        sources=tuple(corpus.files),
        skipped=tuple(corpus.skipped),
        versions={"tokenizers": _tokenizers_version(), "xsake": xsake.__version__},
    )
    write_index(folder, index)
    log.remove()
    return BuildResult(index, kept=num_kept, rewritten=num_recorded - num_kept)


def _verify(path: Path, shard: Shard, itemsize: int, on_progress: BuildCallback) -> None:
    on_progress(BuildProgress(f"checking {path.name}"))
    data.require_intact(path, shard, itemsize, "full")


def _find_intact(
    folder: Path, recorded: Sequence[FinishedShard], itemsize: int, on_progress: BuildCallback
) -> Sequence[FinishedShard]:
    """Return the shards before the first damaged one."""
    for position, each in enumerate(recorded):
        path = data.shard_path(folder, each.split, each.number)
        try:
            _verify(path, each.shard, itemsize, on_progress)
        except ArgumentError:
            return recorded[:position]
    return recorded


def _write_shards(
    corpus: Corpus,
    vocabulary: "Vocabulary",
    writers: Mapping[Split, "ShardWriter"],
    log: "BuildLog",
    on_progress: BuildCallback,
) -> None:
    """Tokenize every piece that is not in a written shard."""
    num_done, num_skipped, started = 0, 0, time.monotonic()

    def report(finished: FinishedShard | None = None) -> None:
        if finished is not None:
            log.add("shard", **finished.model_dump())
        done, tokens = num_done + num_skipped, sum(writer.tokens for writer in writers.values())
        left = corpus.pieces - done
        remaining = (time.monotonic() - started) / num_done * left if num_done else None
        on_progress(BuildProgress("tokenizing", done, corpus.pieces, tokens, remaining, finished))

    def encode(pending: Sequence[tuple[int, Piece]]) -> None:
        nonlocal num_done
        encoded = vocabulary.encode([piece.text for _, piece in pending])
        for (number, piece), tokens in zip(pending, encoded, strict=True):
            if piece.is_last:
                tokens = np.append(tokens, vocabulary.dtype.type(vocabulary.end_id))
            for finished in writers[piece.split].add(number, tokens):
                report(finished)
        num_done += len(pending)
        report()

    pending: list[tuple[int, Piece]] = []
    num_chars = 0
    for number, piece in enumerate(corpus.read()):
        if not writers[piece.split].needs(number):
            num_skipped += 1
            continue
        if pending and num_chars + len(piece.text) > MAX_PIECE_CHARS:
            encode(pending)
            pending, num_chars = [], 0
        pending.append((number, piece))
        num_chars += len(piece.text)
    encode(pending)
    for writer in writers.values():
        if (finished := writer.finish(corpus.pieces)) is not None:
            report(finished)


def _recipe(
    tokenizer: "TokenizerFile | NewTokenizer", corpus: Corpus, settings: BuildSettings
) -> str:
    """Return a digest of everything that the bytes of the build depend on."""
    identity: dict[str, str | int] = (
        {"vocabulary": tokenizer.vocabulary}
        if isinstance(tokenizer, NewTokenizer)
        else {"sha256": tokenizer.sha256, "end": tokenizer.end_token}
    )
    parts = {
        "schema": 1,
        "tokenizer": identity,
        "tokenizers": _tokenizers_version(),
        "files": [(file.name, file.sha256) for file in corpus.files],
        "shard_tokens": settings.shard_tokens,
        "validation": settings.validation,
        "longest_piece": MAX_PIECE_CHARS,
    } | ({"invalid": "skip"} if settings.invalid == "skip" else {})
    text = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def _prepare_folder(folder: Path, recipe: str, *, overwrite: bool) -> DataIndex | None:
    """Return the index of a complete build; raise if the folder holds anything else."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        index = data.read_index(folder) if (folder / INDEX).exists() else None
    except ArgumentError:
        if not overwrite:
            raise
        index = None
    existing = BuildLog(folder).recipe if index is None else index.recipe
    is_build = existing is not None or (overwrite and data.shard_path(folder, "train", 0).exists())
    names = [path.name for path in folder.iterdir() if not re.fullmatch(_TEMPORARY, path.name)]
    if names and not is_build:
        got = f"{folder} has {ascii(min(names))[1:-1]}"
        what = "the folder is not empty and holds other files than a build"
        fix = "use another folder with -o, or --no-resume if it is a build without its index"
        raise ArgumentError(
            "foreign-files", what, got=got, expected="a new folder or an earlier build", fix=fix
        )
    if existing not in (None, recipe) and not overwrite:
        got = f"{folder}: built from other texts, another tokenizer or other settings"
        fix = "use another folder with -o, or replace the build with --no-resume"
        raise ArgumentError("other-build", "the folder holds another build", got=got, fix=fix)
    if overwrite:
        # The index first and the log last, so that a partial build is never taken for another.
        (folder / INDEX).unlink(missing_ok=True)
    removed = rf"{_BUILD_FILES}|{_TEMPORARY}" if overwrite else _TEMPORARY
    for path in sorted(folder.iterdir(), key=lambda path: path.name == BUILD_LOG):
        if re.fullmatch(removed, path.name):
            path.unlink()
    return None if overwrite else index


class BuildLog:
    """Steps of an unfinished build, in memory and in an append-only file.

    An incomplete last line of a killed process is ignored, and its step is repeated. `shards` are
    those of the current tokenizer, by split, from the first on without a gap.
    """

    def __init__(self, folder: Path):
        self._path = folder / BUILD_LOG
        self._log = JsonlLog(self._path)
        self.recipe: str | None = None
        self.tokenizer: str | None = None
        self.shards: dict[Split, list[FinishedShard]] = {split: [] for split in SPLITS}
        for line in self._path.read_bytes().splitlines() if self._path.exists() else ():
            with contextlib.suppress(ValueError):
                self._take(json.loads(line))

    def add(self, step: str, **values: Any) -> None:
        """Append a step; it is on disk when this returns."""
        line = {"step": step, **values}
        self._take(line)
        self._log.append(json.dumps(line), sync=True)

    def remove(self) -> None:
        """Delete the log of a finished build."""
        self._path.unlink(missing_ok=True)

    def _take(self, line: Any) -> None:
        match line:
            case {"step": "start", "recipe": str(recipe)}:
                self.recipe = recipe
            case {"step": "tokenizer", "sha256": str(sha256)}:
                if sha256 != self.tokenizer:
                    self.shards = {split: [] for split in SPLITS}
                self.tokenizer = sha256
            case {"step": "shard", **values}:
                finished = FinishedShard.model_validate(values)
                if finished.number <= len(self.shards[finished.split]):
                    self.shards[finished.split][finished.number :] = [finished]


class ShardWriter:
    """Writer of a split's tokens as shards of equal size, after those that are finished."""

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype,
        size: int,
        split: Split,
        finished: Sequence[FinishedShard] = (),
    ):
        self._folder, self._dtype, self._size, self._split = folder, dtype, size, split
        self.shards = [each.shard for each in finished]
        self._piece, self._offset = (
            (finished[-1].piece, finished[-1].offset) if finished else (0, 0)
        )
        self._parts: list[np.ndarray] = []
        self._num_buffered = 0

    @property
    def tokens(self) -> int:
        """Number of tokens, written and buffered."""
        return sum(shard.tokens for shard in self.shards) + self._num_buffered

    def needs(self, piece: int) -> bool:
        """Return whether some tokens of a piece are not in a written shard."""
        return piece >= self._piece

    def add(self, piece: int, tokens: UInt[np.ndarray, " n"]) -> Iterator[FinishedShard]:
        """Add all tokens of the next needed piece, and yield the shards that are full."""
        used = self._offset if piece == self._piece else 0
        while (missing := self._size - self._num_buffered) <= len(tokens) - used:
            self._parts.append(tokens[used : used + missing])
            used += missing
            yield self._write(piece, used)
        self._parts.append(tokens[used:])
        self._num_buffered += len(tokens) - used

    def finish(self, pieces: int) -> FinishedShard | None:
        """Write the remaining tokens as the last shard; `pieces` is the number of all pieces."""
        return self._write(pieces, 0) if self._num_buffered else None

    def _write(self, piece: int, offset: int) -> FinishedShard:
        content = np.concatenate(self._parts).astype(self._dtype).tobytes()
        number, self._parts, self._num_buffered = len(self.shards), [], 0
        atomic_write(data.shard_path(self._folder, self._split, number), content)
        digest = hashlib.blake2b(content, digest_size=32).hexdigest()
        shard = Shard(tokens=len(content) // self._dtype.itemsize, blake2b=digest)
        self.shards.append(shard)
        return FinishedShard(
            split=self._split, number=number, shard=shard, piece=piece, offset=offset
        )


# Tokenizer of a data folder: from a checkpoint, or trained on the texts


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """Content of a tokenizer.json, and the token of its vocabulary that ends documents."""

    content: bytes
    end_token: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()

    @classmethod
    def from_checkpoint(cls, path: Path, end_token: str | None = None) -> "TokenizerFile":
        """Read the tokenizer of a checkpoint, by its folder or its tokenizer.json."""
        folder = path.parent if path.name == TOKENIZER else path
        if not (folder / TOKENIZER).exists():
            what, expected = "the tokenizer does not exist", f"a {TOKENIZER}, or a folder with one"
            fix = f"rename the file to {TOKENIZER}" if path.is_file() else ""
            raise ArgumentError("no-tokenizer", what, got=path, expected=expected, fix=fix)
        end_token = _resolve_end_token(Tokenizer.load(folder), end_token)
        return cls((folder / TOKENIZER).read_bytes(), end_token)

    @classmethod
    def train(cls, texts: Iterator[str], vocabulary: int) -> "TokenizerFile":
        """Train a tokenizer of at most this size; the same texts give the same file."""
        tokenizers = _import_tokenizers()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END_TOKEN],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        short = (part for text in texts for part in split_long_runs(text))
        tokenizer.train_from_iterator(short, trainer)
        return cls(tokenizer.to_str(pretty=True).encode(), END_TOKEN)

    def install(self, folder: Path) -> None:
        """Write it to a folder, in the form of a checkpoint."""
        atomic_write(folder / TOKENIZER, self.content)
        atomic_write(folder / TOKENIZER_CONFIG, json.dumps({"eos_token": self.end_token}) + "\n")


class Vocabulary:
    """Tokenizer of a data folder; special tokens in a text are encoded as plain text."""

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.load(folder)
        self.tokenizer.inner.encode_special_tokens = True
        (self.end_id,) = self.tokenizer.end_ids

    @functools.cached_property
    def size(self) -> int:
        """Largest token ID + 1; IDs may have gaps."""
        return max(self.tokenizer.inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> np.dtype:
        """Smallest dtype that holds every token, little-endian."""
        return np.dtype("<u2" if self.size <= 2**16 else "<u4")

    def encode(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " n"]]:
        """Tokenize texts on all cores, without special tokens."""
        with library_errors():
            encodings = self.tokenizer.inner.encode_batch_fast(
                list(texts), add_special_tokens=False
            )
        return [np.asarray(encoding.ids, self.dtype) for encoding in encodings]


def split_long_runs(text: str) -> Iterator[str]:
    """Yield a text in parts; no run of letters, or of spaces, exceeds `MAX_WORD_CHARS`.

    Example:
        >>> [len(part) for part in split_long_runs("one two " + "x" * 2500 + " end")]
        [1008, 1000, 504]
    """
    # A long run contains at least one of these windows; only such texts are searched.
    window = MAX_WORD_CHARS // 2
    starts = range(0, len(text), window)
    if not any(len(text[start : start + window].split(None, 1)) < 2 for start in starts):
        yield text
        return
    done = 0
    for match in _LONG_RUN.finditer(text):
        yield text[done : match.end()]
        done = match.end()
    yield text[done:]


def _tokenizers_version() -> str:
    """Return the version of the package tokenizers, which determines the tokens."""
    _import_tokenizers()
    return importlib.metadata.version("tokenizers")


def _import_tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        what, fix = "tokenization needs the package tokenizers", 'pip install "xsake[train]"'
        raise MissingExtraError("build-tokenizers", what, fix=fix) from missing
    return tokenizers


def _resolve_end_token(tokenizer: Tokenizer, requested: str | None) -> str:
    """Return the requested end token, that of the checkpoint, or the usual one."""
    inner = tokenizer.inner
    added = inner.get_added_tokens_decoder().values()
    special = ", ".join([repr(token.content)[1:-1] for token in added if token.special][:8])
    if requested is None and len(tokenizer.end_ids) == 1:
        return inner.id_to_token(tokenizer.end_ids[0])
    if inner.token_to_id(requested or END_TOKEN) is not None:
        return requested or END_TOKEN
    if requested is not None:
        what, expected = "the end token is not in the tokenizer", f"a token, such as {special}"
        raise ArgumentError("unknown-end-token", what, got=repr(requested)[:120], expected=expected)
    expected = f"{END_TOKEN}, or an eos_token in {TOKENIZER_CONFIG}"
    got, fix = f"special tokens {special or 'none'}", "set it with --end-token"
    raise ArgumentError(
        "no-end-token", "the tokenizer has no end token", got=got, expected=expected, fix=fix
    )


def _require_range(what: str, value: int | float, least: int, most: int | float) -> None:
    if not least <= value <= most:
        raise ArgumentError(
            "build-range", f"{what} is out of range", got=value, expected=f"{least} to {most:,}"
        )
