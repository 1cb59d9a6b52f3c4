"""Tokenizer of a data folder: from a checkpoint, or trained on the texts."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
from jaxtyping import UInt

from xsake._io import atomic_write
from xsake.errors import ArgumentError, MissingExtraError
from xsake.model.tokenizer import TOKENIZER, Tokenizer
from xsake.model.tokenizer_file import library_errors

TOKENIZER_CONFIG = "tokenizer_config.json"
END_TOKEN = "<|endoftext|>"
MIN_VOCABULARY, MAX_VOCABULARY = 257, 2**24  # 256 bytes and the end token
MAX_WORD_CHARS = 1000  # training time is quadratic in the length of a word

_LONG_RUN = re.compile(rf"\S{{{MAX_WORD_CHARS}}}|\s{{{MAX_WORD_CHARS}}}")


@dataclasses.dataclass(frozen=True)
class NewTokenizer:
    """Byte-level BPE tokenizer to train on the texts of the build.

    Args:
        vocabulary: maximum number of tokens, including 256 bytes and the end token.
    """

    vocabulary: int

    def __post_init__(self):
        if not MIN_VOCABULARY <= self.vocabulary <= MAX_VOCABULARY:
            raise ArgumentError(
                "the vocabulary size is out of range",
                got=self.vocabulary,
                expected=f"{MIN_VOCABULARY} to {MAX_VOCABULARY:,}",
            )


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """Content of a tokenizer.json, and the token that ends documents.

    Args:
        content: of the file.
        end_token: in its vocabulary.
    """

    content: bytes
    end_token: str

    @property
    def sha256(self) -> str:
        """SHA-256 of the content."""
        return hashlib.sha256(self.content).hexdigest()

    @classmethod
    def from_checkpoint(cls, path: Path, end_token: str | None = None) -> "TokenizerFile":
        """Read the tokenizer of a checkpoint.

        Args:
            path: its folder, or the tokenizer.json.
            end_token: appended to every document; None: that of the checkpoint.
        """
        folder = path.parent if path.name == TOKENIZER else path
        if not (folder / TOKENIZER).exists():
            raise ArgumentError(
                "the tokenizer does not exist",
                got=path,
                expected=f"a {TOKENIZER}, or a folder with one",
                fix=f"rename the file to {TOKENIZER}" if path.is_file() else "",
            )
        tokenizer = Tokenizer.load(folder)
        return cls((folder / TOKENIZER).read_bytes(), _resolve_end_token(tokenizer, end_token))

    @classmethod
    def train(cls, texts: Iterator[str], vocabulary: int) -> "TokenizerFile":
        """Train a tokenizer; the same texts give the same file.

        Args:
            texts: to train on; runs of more than `MAX_WORD_CHARS` characters without a space, or of
                spaces only, are split.
            vocabulary: maximum number of tokens; short texts give fewer.
        """
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

    @classmethod
    def load_previous(cls, folder: Path, sha256: str | None) -> "TokenizerFile | None":
        """Return the tokenizer that an interrupted build has trained, if it has this digest."""
        path = folder / TOKENIZER
        trained = cls(path.read_bytes() if path.is_file() else b"", END_TOKEN)
        return trained if trained.sha256 == sha256 else None

    def install(self, folder: Path) -> None:
        """Write it to a folder, in the form of a checkpoint."""
        atomic_write(folder / TOKENIZER, self.content)
        atomic_write(folder / TOKENIZER_CONFIG, json.dumps({"eos_token": self.end_token}) + "\n")


class Vocabulary:
    """Tokenizer of texts; special tokens in a text are encoded as plain text.

    Args:
        folder: of `TokenizerFile.install`.
    """

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
    """Yield a text in parts in which no word has more than `MAX_WORD_CHARS` characters.

    Args:
        text: unchanged unless a run of letters or of spaces is longer.

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


def library_version() -> str:
    """Return the version of the package tokenizers, which determines the tokens."""
    _import_tokenizers()
    return importlib.metadata.version("tokenizers")


def _import_tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "tokenization needs the package tokenizers", fix='pip install "xsake[train]"'
        ) from missing
    return tokenizers


def _resolve_end_token(tokenizer: Tokenizer, requested: str | None) -> str:
    inner = tokenizer.inner
    if requested is not None:
        if inner.token_to_id(requested) is None:
            raise ArgumentError(
                "the end token is not in the tokenizer",
                got=repr(requested)[:120],
                expected="one of its tokens, such as " + ", ".join(_special_tokens(tokenizer)),
            )
        return requested
    if len(tokenizer.end_ids) == 1:
        return inner.id_to_token(tokenizer.end_ids[0])
    if inner.token_to_id(END_TOKEN) is not None:
        return END_TOKEN
    raise ArgumentError(
        "the tokenizer has no end token",
        got=f"special tokens {', '.join(_special_tokens(tokenizer)) or 'none'}",
        expected=f"{END_TOKEN}, or an eos_token in {TOKENIZER_CONFIG}",
        fix="set it with --end-token",
    )


def _special_tokens(tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.inner.get_added_tokens_decoder().values()
    return [repr(token.content)[1:-1] for token in added if token.special][:8]
