"""Builds a data folder from texts: tokens in shards and an index, whole or to be gone on with."""

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
    LONGEST_PIECE,
    ChangedTextError,
    Corpus,
    Invalid,
    Piece,
)
from xsake.training.data.folder import prepare
from xsake.training.data.index import (
    BYTES_OF,
    SPLITS,
    Index,
    Split,
    SplitIndex,
    Splits,
    TokenizerIdentity,
    shard_path,
    write_index,
)
from xsake.training.data.shards import Finished, ShardWriter, fault_of, require_sound
from xsake.training.data.unfinished import Unfinished
from xsake.training.data.vocabulary import (
    NewTokenizer,
    TokenizerFile,
    Vocabulary,
    library_version,
)

SHARD_TOKENS, MOST_SHARD_TOKENS = 2**26, 2**30


@dataclasses.dataclass(frozen=True)
class Settings:
    """How texts become a data folder.

    Args:
        shard_tokens: of every file but the last.
        validation: share of documents that are kept for validation.
        end_token: stands after every document; None: what the tokenizer says.
        invalid: a document that cannot be used, such as one that is not UTF-8, ends the build
            ("refuse"), or is left out and counted ("skip").
    """

    shard_tokens: int = SHARD_TOKENS
    validation: float = 0.01
    end_token: str | None = None
    invalid: Invalid = "refuse"

    def __post_init__(self):
        if not 1 <= self.shard_tokens <= MOST_SHARD_TOKENS:
            raise ArgumentError(
                "a shard cannot have so many tokens",
                got=self.shard_tokens,
                expected=f"1 to {MOST_SHARD_TOKENS:,}",
            )
        if not 0 <= self.validation < 1:
            raise ArgumentError(
                "the share for validation is no share that leaves something for training",
                got=self.validation,
                expected="at least 0 and below 1",
            )


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a build is.

    Args:
        doing: what is being done.
        done: pieces of the texts that are tokens now.
        total: pieces of the texts.
        tokens: so far.
        remaining_seconds: about; None while nobody knows.
        finished: the shard that was written just now.
    """

    doing: str
    done: int = 0
    total: int = 0
    tokens: int = 0
    remaining_seconds: float | None = None
    finished: Finished | None = None


@dataclasses.dataclass(frozen=True)
class Built:
    """What came out of a build.

    Args:
        index: of the folder.
        kept: shards that an earlier run had written.
        again: shards that an earlier run had written and that had to be written again.
        is_new: whether anything was missing.
    """

    index: Index
    kept: int
    again: int
    is_new: bool = True


Watch = Callable[[Progress], None]


def build(
    tokenizer: Path | NewTokenizer,
    texts: Sequence[Path],
    folder: Path,
    settings: Settings | None = None,
    *,
    fresh: bool = False,
    watch: Watch | None = None,
) -> Built:
    """Make tokens of texts, as `TokenLoader` reads them.

    The same texts, tokenizer and settings give the same bytes. The folder cannot be read before
    all is done; an interrupted build goes on when it is asked for again.

    Args:
        tokenizer: folder of a checkpoint or its tokenizer.json; or one that is to be trained.
        texts: files and folders, as `xsake.evaluation.read_texts` takes them.
        folder: new or empty, or of an earlier build of the same.
        settings: how.
        fresh: forget what an earlier build has left in the folder.
        watch: is told how far it is.
    """
    settings, tell = settings or Settings(), watch or (lambda progress: None)
    source = _source(tokenizer, settings)
    corpus = Corpus.survey(
        texts,
        settings.validation,
        lambda name: tell(Progress(f"reading {name}")),
        invalid=settings.invalid,
    )
    recipe = _recipe(source, corpus, settings)
    complete = prepare(folder, recipe, fresh=fresh)
    if complete is not None:
        return _checked(folder, complete, tell)
    unfinished = Unfinished(folder)
    try:
        return _go_on(folder, recipe, source, corpus, settings, unfinished, tell)
    except ChangedTextError:
        unfinished.remove()  # its shards may hold what is no longer in the texts
        raise


def _go_on(
    folder: Path,
    recipe: str,
    source: TokenizerFile | NewTokenizer,
    corpus: Corpus,
    settings: Settings,
    unfinished: Unfinished,
    tell: Watch,
) -> Built:
    """Do what is missing of a build."""
    if unfinished.recipe is None:
        unfinished.start(recipe)
    used, asked = source, None
    if isinstance(used, NewTokenizer):
        asked = used.vocabulary
        used = TokenizerFile.trained_before(folder, unfinished.tokenizer)
        if used is None:
            tell(Progress(f"training a tokenizer of {asked:,} tokens"))
            used = TokenizerFile.trained(corpus.training_texts(), asked)
    used.install(folder)
    unfinished.install(used.sha256)
    task = _Task(folder, corpus, Vocabulary(folder), settings, unfinished, tell)
    task.run()
    index = _index(recipe, used, asked, task)
    write_index(folder, index)
    unfinished.remove()
    return Built(index, kept=task.kept, again=task.again)


class _Task:
    """From pieces of texts to shards; knows where an earlier run stopped."""

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        vocabulary: Vocabulary,
        settings: Settings,
        unfinished: Unfinished,
        tell: Watch,
    ):
        self.corpus, self.vocabulary, self.settings = corpus, vocabulary, settings
        self._unfinished, self._tell = unfinished, tell
        self._done, self._skipped, self._started = 0, 0, time.monotonic()
        self.kept = self.again = 0
        self.writers: dict[Split, ShardWriter] = {}
        for split, known in unfinished.shards.items():
            sound = self._sound(folder, known)
            self.kept, self.again = self.kept + len(sound), self.again + len(known) - len(sound)
            self.writers[split] = ShardWriter(
                folder,
                split,
                dtype=vocabulary.dtype,
                size=settings.shard_tokens,
                kept=sound,
                note=self._note,
            )

    def run(self) -> None:
        """Write every shard that is missing."""
        waiting: list[tuple[int, Piece]] = []
        characters = 0
        self._started = time.monotonic()
        for number, piece in enumerate(self.corpus.read()):
            if not self.writers[piece.split].needs(number):
                self._skipped += 1
                continue
            if waiting and characters + len(piece.text) > LONGEST_PIECE:
                self._encode(waiting)
                waiting, characters = [], 0
            waiting.append((number, piece))
            characters += len(piece.text)
        self._encode(waiting)
        for writer in self.writers.values():
            writer.finish(self.corpus.pieces)

    def _encode(self, waiting: Sequence[tuple[int, Piece]]) -> None:
        end = np.array([self.vocabulary.end_id], self.vocabulary.dtype)
        encoded = self.vocabulary.encode([piece.text for _, piece in waiting])
        for (number, piece), tokens in zip(waiting, encoded, strict=True):
            whole = np.concatenate([tokens, end]) if piece.is_last else tokens
            self.writers[piece.split].add(number, whole)
        self._done += len(waiting)
        self._tell(self._progress())

    def _sound(self, folder: Path, known: Sequence[Finished]) -> list[Finished]:
        """Those before the first that is not what was written."""
        for place, finished in enumerate(known):
            path = shard_path(folder, finished.split, finished.number)
            self._tell(Progress(f"checking {path.name}"))
            if fault_of(path, finished.shard, self.vocabulary.dtype.itemsize, "full"):
                return list(known[:place])
        return list(known)

    def _note(self, finished: Finished) -> None:
        self._unfinished.write(finished)
        self._tell(dataclasses.replace(self._progress(), finished=finished))

    def _progress(self) -> Progress:
        total = self.corpus.pieces
        done = self._done + self._skipped
        left = None
        if self._done:
            left = (time.monotonic() - self._started) / self._done * (total - done)
        tokens = sum(writer.tokens for writer in self.writers.values())
        return Progress("making tokens", done, total, tokens, left)


def _source(tokenizer: Path | NewTokenizer, settings: Settings) -> TokenizerFile | NewTokenizer:
    if isinstance(tokenizer, Path):
        return TokenizerFile.of_checkpoint(tokenizer, settings.end_token)
    if settings.end_token is not None:
        raise ArgumentError(
            "a new tokenizer has its own token for the end",
            got=f"--end-token {settings.end_token}",
            fix="leave --end-token out",
        )
    return tokenizer


def _checked(folder: Path, complete: Index, tell: Watch) -> Built:
    """An earlier build of the same data, if every file of it is sound."""
    kept = 0
    for name in SPLITS:
        for number, shard in enumerate(complete.split(name).shards):
            path = shard_path(folder, name, number)
            tell(Progress(f"checking {path.name}"))
            require_sound(path, shard, BYTES_OF[complete.dtype], "full")
            kept += 1
    return Built(complete, kept=kept, again=0, is_new=False)


def _recipe(tokenizer: TokenizerFile | NewTokenizer, corpus: Corpus, settings: Settings) -> str:
    """Names what is built: everything that its bytes depend on."""
    if isinstance(tokenizer, TokenizerFile):
        made_by = {"sha256": tokenizer.sha256, "end": tokenizer.end_token}
    else:
        made_by = {"vocabulary": tokenizer.vocabulary}
    parts = {
        "schema": 1,
        "tokenizer": made_by,
        "tokenizers": library_version(),
        "files": [(file.name, file.sha256) for file in corpus.files],
        "shard_tokens": settings.shard_tokens,
        "validation": settings.validation,
        "longest_piece": LONGEST_PIECE,
    }
    if settings.invalid == "skip":
        parts["invalid"] = "skip"
    text = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(text, digest_size=32).hexdigest()


def _index(recipe: str, used: TokenizerFile, asked: int | None, task: _Task) -> Index:
    splits = {
        name: SplitIndex(
            documents=task.corpus.documents[name],
            tokens=sum(shard.tokens for shard in writer.shards),
            shards=tuple(writer.shards),
        )
        for name, writer in task.writers.items()
    }
    vocabulary = task.vocabulary
    return Index(
        recipe=recipe,
        tokenizer=TokenizerIdentity(
            sha256=used.sha256,
            vocabulary=vocabulary.size,
            end_token=used.end_token,
            end_id=vocabulary.end_id,
            asked_vocabulary=asked,
        ),
        dtype="uint16" if vocabulary.dtype.itemsize == BYTES_OF["uint16"] else "uint32",
        shard_tokens=task.settings.shard_tokens,
        validation=task.settings.validation,
        splits=Splits(**splits),
        sources=task.corpus.files,
        skipped=task.corpus.skipped,
        versions={"tokenizers": library_version(), "xsake": xsake.__version__},
    )
