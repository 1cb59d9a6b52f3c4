"""Build a data folder from texts: token shards and an index. Interrupted builds can be resumed."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import xsake
from xsake.errors import ArgumentError
from xsake.training.data.corpus import (
    MAX_PIECE_CHARS,
    ChangedTextError,
    Corpus,
    OnInvalid,
    Piece,
)
from xsake.training.data.folder import prepare
from xsake.training.data.index import (
    ITEMSIZE,
    SPLITS,
    DataIndex,
    Split,
    SplitIndex,
    Splits,
    TokenizerIdentity,
    shard_path,
    write_index,
)
from xsake.training.data.shards import FinishedShard, ShardWriter, find_fault, require_intact
from xsake.training.data.unfinished import BuildLog
from xsake.training.data.vocabulary import (
    NewTokenizer,
    TokenizerFile,
    Vocabulary,
    library_version,
)

SHARD_TOKENS, MAX_SHARD_TOKENS = 2**26, 2**30


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
        if not 1 <= self.shard_tokens <= MAX_SHARD_TOKENS:
            raise ArgumentError(
                "the size of a shard is out of range",
                got=self.shard_tokens,
                expected=f"1 to {MAX_SHARD_TOKENS:,}",
            )
        if not 0 <= self.validation < 1:
            raise ArgumentError(
                "the validation share is out of range",
                got=self.validation,
                expected="at least 0 and below 1",
            )


@dataclasses.dataclass(frozen=True)
class BuildProgress:
    """Progress of a build.

    Args:
        doing: current activity.
        done: number of tokenized pieces.
        total: number of pieces.
        tokens: so far.
        remaining_seconds: estimate; None while unknown.
        finished: shard that was just written.
    """

    doing: str
    done: int = 0
    total: int = 0
    tokens: int = 0
    remaining_seconds: float | None = None
    finished: FinishedShard | None = None


@dataclasses.dataclass(frozen=True)
class BuildResult:
    """Result of a build.

    Args:
        index: of the folder.
        kept: number of shards of an earlier build that were kept.
        rewritten: number of shards of an earlier build that were written again.
        is_new: whether anything was missing.
    """

    index: DataIndex
    kept: int
    rewritten: int
    is_new: bool = True


BuildCallback = Callable[[BuildProgress], None]


def build(
    tokenizer: Path | NewTokenizer,
    texts: Sequence[Path],
    folder: Path,
    settings: BuildSettings | None = None,
    *,
    overwrite: bool = False,
    on_progress: BuildCallback | None = None,
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
    settings, on_progress = settings or BuildSettings(), on_progress or (lambda progress: None)
    source = _resolve_tokenizer(tokenizer, settings)
    corpus = Corpus.survey(
        texts,
        settings.validation,
        lambda name: on_progress(BuildProgress(f"reading {name}")),
        invalid=settings.invalid,
    )
    recipe = _recipe(source, corpus, settings)
    complete = prepare(folder, recipe, overwrite=overwrite)
    if complete is not None:
        return _verify_build(folder, complete, on_progress)
    build_log = BuildLog(folder)
    try:
        return _resume_build(folder, recipe, source, corpus, settings, build_log, on_progress)
    except ChangedTextError:
        build_log.remove()  # its shards may contain text that has changed
        raise


def _resume_build(
    folder: Path,
    recipe: str,
    source: TokenizerFile | NewTokenizer,
    corpus: Corpus,
    settings: BuildSettings,
    build_log: BuildLog,
    on_progress: BuildCallback,
) -> BuildResult:
    """Do the missing parts of a build."""
    if build_log.recipe is None:
        build_log.start(recipe)
    tokenizer_file, requested_size = source, None
    if isinstance(tokenizer_file, NewTokenizer):
        requested_size = tokenizer_file.vocabulary
        tokenizer_file = TokenizerFile.load_previous(folder, build_log.tokenizer)
        if tokenizer_file is None:
            on_progress(BuildProgress(f"training a tokenizer of {requested_size:,} tokens"))
            tokenizer_file = TokenizerFile.train(corpus.training_texts(), requested_size)
    tokenizer_file.install(folder)
    build_log.install(tokenizer_file.sha256)
    task = _BuildTask(folder, corpus, Vocabulary(folder), settings, build_log, on_progress)
    task.run()
    index = _make_index(recipe, tokenizer_file, requested_size, task)
    write_index(folder, index)
    build_log.remove()
    return BuildResult(index, kept=task.kept, rewritten=task.rewritten)


class _BuildTask:
    """Tokenization of pieces into shards, from where an earlier build stopped."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        vocabulary: Vocabulary,
        settings: BuildSettings,
        build_log: BuildLog,
        on_progress: BuildCallback,
    ):
        self.corpus, self.vocabulary, self.settings = corpus, vocabulary, settings
        self._build_log, self._on_progress = build_log, on_progress
        self._done, self._skipped, self._started = 0, 0, time.monotonic()
        self.kept = self.rewritten = 0
        self.writers: dict[Split, ShardWriter] = {}
        for split, recorded in build_log.shards.items():
            intact = self._find_intact(folder, recorded)
            self.kept, self.rewritten = (
                self.kept + len(intact),
                self.rewritten + len(recorded) - len(intact),
            )
            self.writers[split] = ShardWriter(
                folder,
                split,
                dtype=vocabulary.dtype,
                size=settings.shard_tokens,
                finished_shards=intact,
                on_finished=self._log_shard,
            )

    def run(self) -> None:
        """Write every missing shard."""
        pending: list[tuple[int, Piece]] = []
        characters = 0
        self._started = time.monotonic()
        for number, piece in enumerate(self.corpus.read()):
            if not self.writers[piece.split].needs(number):
                self._skipped += 1
                continue
            if pending and characters + len(piece.text) > MAX_PIECE_CHARS:
                self._encode(pending)
                pending, characters = [], 0
            pending.append((number, piece))
            characters += len(piece.text)
        self._encode(pending)
        for writer in self.writers.values():
            writer.finish(self.corpus.pieces)

    def _encode(self, pending: Sequence[tuple[int, Piece]]) -> None:
        end = np.array([self.vocabulary.end_id], self.vocabulary.dtype)
        encoded = self.vocabulary.encode([piece.text for _, piece in pending])
        for (number, piece), tokens in zip(pending, encoded, strict=True):
            whole = np.concatenate([tokens, end]) if piece.is_last else tokens
            self.writers[piece.split].add(number, whole)
        self._done += len(pending)
        self._on_progress(self._progress())

    def _find_intact(self, folder: Path, recorded: Sequence[FinishedShard]) -> list[FinishedShard]:
        """Return the shards before the first damaged one."""
        for position, finished in enumerate(recorded):
            path = shard_path(folder, finished.split, finished.number)
            self._on_progress(BuildProgress(f"checking {path.name}"))
            if find_fault(path, finished.shard, self.vocabulary.dtype.itemsize, "full"):
                return list(recorded[:position])
        return list(recorded)

    def _log_shard(self, finished: FinishedShard) -> None:
        self._build_log.write(finished)
        self._on_progress(dataclasses.replace(self._progress(), finished=finished))

    def _progress(self) -> BuildProgress:
        total = self.corpus.pieces
        done = self._done + self._skipped
        remaining = None
        if self._done:
            remaining = (time.monotonic() - self._started) / self._done * (total - done)
        tokens = sum(writer.tokens for writer in self.writers.values())
        return BuildProgress("tokenizing", done, total, tokens, remaining)


def _resolve_tokenizer(
    tokenizer: Path | NewTokenizer, settings: BuildSettings
) -> TokenizerFile | NewTokenizer:
    if isinstance(tokenizer, Path):
        return TokenizerFile.from_checkpoint(tokenizer, settings.end_token)
    if settings.end_token is not None:
        raise ArgumentError(
            "a new tokenizer has a fixed end token",
            got=f"--end-token {settings.end_token}",
            fix="remove --end-token",
        )
    return tokenizer


def _verify_build(folder: Path, complete: DataIndex, on_progress: BuildCallback) -> BuildResult:
    """Return a complete earlier build if all its files are intact."""
    kept = 0
    for name in SPLITS:
        for number, shard in enumerate(complete.split(name).shards):
            path = shard_path(folder, name, number)
            on_progress(BuildProgress(f"checking {path.name}"))
            require_intact(path, shard, ITEMSIZE[complete.dtype], "full")
            kept += 1
    return BuildResult(complete, kept=kept, rewritten=0, is_new=False)


def _recipe(
    tokenizer: TokenizerFile | NewTokenizer, corpus: Corpus, settings: BuildSettings
) -> str:
    """Return a digest of everything that the bytes of the build depend on."""
    if isinstance(tokenizer, TokenizerFile):
        identity = {"sha256": tokenizer.sha256, "end": tokenizer.end_token}
    else:
        identity = {"vocabulary": tokenizer.vocabulary}
    parts = {
        "schema": 1,
        "tokenizer": identity,
        "tokenizers": library_version(),
        "files": [(file.name, file.sha256) for file in corpus.files],
        "shard_tokens": settings.shard_tokens,
        "validation": settings.validation,
        "longest_piece": MAX_PIECE_CHARS,
    }
    if settings.invalid == "skip":
        parts["invalid"] = "skip"
    text = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def _make_index(
    recipe: str, tokenizer_file: TokenizerFile, requested_size: int | None, task: _BuildTask
) -> DataIndex:
    splits = {
        name: SplitIndex(
            documents=task.corpus.documents[name],
            tokens=sum(shard.tokens for shard in writer.shards),
            shards=tuple(writer.shards),
        )
        for name, writer in task.writers.items()
    }
    vocabulary = task.vocabulary
    return DataIndex(
        recipe=recipe,
        tokenizer=TokenizerIdentity(
            sha256=tokenizer_file.sha256,
            vocabulary=vocabulary.size,
            end_token=tokenizer_file.end_token,
            end_id=vocabulary.end_id,
            asked_vocabulary=requested_size,
        ),
        dtype="uint16" if vocabulary.dtype.itemsize == ITEMSIZE["uint16"] else "uint32",
        shard_tokens=task.settings.shard_tokens,
        validation=task.settings.validation,
        splits=Splits(**splits),
        sources=task.corpus.files,
        skipped=task.corpus.skipped,
        versions={"tokenizers": library_version(), "xsake": xsake.__version__},
    )
