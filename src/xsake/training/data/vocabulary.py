"""The tokenizer of a data folder: taken from a checkpoint or trained on the texts, then kept."""

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

SETTINGS = "tokenizer_config.json"
END_TOKEN = "<|endoftext|>"
SMALLEST, LARGEST = 257, 2**24  # every byte, and the end
MAX_WORD = 1000  # characters: the time of training grows with the square of a word's length

_LONG_RUN = re.compile(rf"\S{{{MAX_WORD}}}|\s{{{MAX_WORD}}}")


@dataclasses.dataclass(frozen=True)
class NewTokenizer:
    """A byte-level BPE tokenizer that is trained on the texts that it will be used for.

    Args:
        vocabulary: tokens that it may have, 256 bytes and the end token included.
    """

    vocabulary: int

    def __post_init__(self):
        if not SMALLEST <= self.vocabulary <= LARGEST:
            raise ArgumentError(
                "a vocabulary of this size cannot be trained",
                got=self.vocabulary,
                expected=f"{SMALLEST} to {LARGEST:,}: every byte and the end of a document fit",
            )


@dataclasses.dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json, and the token that ends documents.

    Args:
        content: of the file.
        end_token: in its vocabulary.
    """

    content: bytes
    end_token: str

    @property
    def sha256(self) -> str:
        """Names the tokenizer."""
        return hashlib.sha256(self.content).hexdigest()

    @classmethod
    def of_checkpoint(cls, path: Path, end_token: str | None = None) -> "TokenizerFile":
        """The tokenizer of a checkpoint.

        Args:
            path: its folder, or the tokenizer.json itself.
            end_token: stands after every document; None: what the checkpoint ends texts with.
        """
        folder = path.parent if path.name == TOKENIZER else path
        if not (folder / TOKENIZER).exists():
            raise ArgumentError(
                "there is no such tokenizer",
                got=path,
                expected=f"a {TOKENIZER}, or a folder that has one",
                fix=f"rename the file to {TOKENIZER}" if path.is_file() else "",
            )
        tokenizer = Tokenizer.load(folder)
        return cls((folder / TOKENIZER).read_bytes(), _end_token(tokenizer, end_token))

    @classmethod
    def trained(cls, texts: Iterator[str], vocabulary: int) -> "TokenizerFile":
        """A new tokenizer; the same texts give the same file.

        Args:
            texts: to learn from; runs of more than `MAX_WORD` characters without a space, or of
                spaces alone, are learned from in parts.
            vocabulary: tokens that it may have; short texts give fewer.
        """
        tokenizers = _package()
        found = tokenizers.Tokenizer(tokenizers.models.BPE())
        found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END_TOKEN],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        short = (part for text in texts for part in split_long_runs(text))
        found.train_from_iterator(short, trainer)
        return cls(found.to_str(pretty=True).encode(), END_TOKEN)

    @classmethod
    def trained_before(cls, folder: Path, sha256: str | None) -> "TokenizerFile | None":
        """What an interrupted build has trained, if it is in its folder and has this digest."""
        path = folder / TOKENIZER
        found = cls(path.read_bytes() if path.is_file() else b"", END_TOKEN)
        return found if found.sha256 == sha256 else None

    def install(self, folder: Path) -> None:
        """Put it into a folder, as a checkpoint would have it."""
        atomic_write(folder / TOKENIZER, self.content)
        atomic_write(folder / SETTINGS, json.dumps({"eos_token": self.end_token}) + "\n")


class Vocabulary:
    """Makes tokens of texts; what a text spells is text, even if it spells a special token.

    Args:
        folder: with what `TokenizerFile.install` put there.
    """

    def __init__(self, folder: Path):
        self.tokenizer = Tokenizer.load(folder)
        self.tokenizer.inner.encode_special_tokens = True
        (self.end_id,) = self.tokenizer.end_ids

    @functools.cached_property
    def size(self) -> int:
        """The largest id and one more: ids may have holes."""
        return max(self.tokenizer.inner.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> np.dtype:
        """The smallest that holds every token, little-endian."""
        return np.dtype("<u2" if self.size <= 2**16 else "<u4")

    def encode(self, texts: Sequence[str]) -> list[UInt[np.ndarray, " n"]]:
        """The tokens of every text, on all cores; nothing is put around them."""
        with library_errors():
            found = self.tokenizer.inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids, self.dtype) for one in found]


def split_long_runs(text: str) -> Iterator[str]:
    """A text in parts, so that no word of them has more than `MAX_WORD` characters.

    Args:
        text: stays as it is unless a run of letters or of spaces is that long.

    Example:
        >>> [len(part) for part in split_long_runs("one two " + "x" * 2500 + " end")]
        [1008, 1000, 504]
    """
    # A run that is too long holds a whole one of these windows, and only such texts are searched.
    window = MAX_WORD // 2
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
    """Of the package tokenizers, which decides what becomes of a text."""
    _package()
    return importlib.metadata.version("tokenizers")


def _package() -> ModuleType:
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "tokens are made by the package tokenizers", fix='pip install "xsake[train]"'
        ) from missing
    return tokenizers


def _end_token(tokenizer: Tokenizer, asked: str | None) -> str:
    inner = tokenizer.inner
    if asked is not None:
        if inner.token_to_id(asked) is None:
            raise ArgumentError(
                "the tokenizer does not have the token that is to end documents",
                got=repr(asked)[:120],
                expected="one of its tokens, such as " + ", ".join(_special_tokens(tokenizer)),
            )
        return asked
    if len(tokenizer.end_ids) == 1:
        return inner.id_to_token(tokenizer.end_ids[0])
    if inner.token_to_id(END_TOKEN) is not None:
        return END_TOKEN
    raise ArgumentError(
        "the tokenizer does not say which token ends a document",
        got=f"its special tokens are {', '.join(_special_tokens(tokenizer)) or 'none'}",
        expected=f"{END_TOKEN}, or an eos_token in {SETTINGS}",
        fix="name it with --end-token",
    )


def _special_tokens(tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.inner.get_added_tokens_decoder().values()
    return [repr(token.content)[1:-1] for token in added if token.special][:8]
