"""Tokenizer of a checkpoint (tokenizer.json), with streaming decoding."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from xsake.errors import CheckpointError, MissingExtraError
from xsake.model.huggingface.files import CheckpointFolder, parse_object
from xsake.model.tokenizer_file import (
    MAX_VALUES,
    TOKENIZER,
    invalid_tokenizer,
    library_errors,
    validate_tokenizer,
)

MAX_TOKENIZER_BYTES, MAX_SETTINGS_BYTES = 2**27, 2**24

# Any of three files may define end tokens.
_ID_FILES = ("config.json", "generation_config.json")
_TOKEN_FILE = "tokenizer_config.json"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        inner: a `tokenizers.Tokenizer`.
        end_ids: end tokens, ascending.
    """

    inner: Any
    end_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint.

        Args:
            directory: has tokenizer.json; config.json, generation_config.json and
                tokenizer_config.json may define end tokens.

        Returns:
            A tokenizer without truncation and padding.
        """
        try:
            import tokenizers
        except ModuleNotFoundError as missing:
            raise MissingExtraError(
                "tokenizers",
                "tokenizer.json requires the package tokenizers",
                fix='pip install "xsake[model]"',
            ) from missing
        folder = CheckpointFolder.open(directory)
        path = folder.file(TOKENIZER)
        if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
            raise invalid_tokenizer(f"{size} bytes, at most {MAX_TOKENIZER_BYTES} are supported")
        content = path.read_bytes()
        try:
            document = parse_object(
                content, TOKENIZER, max_bytes=MAX_TOKENIZER_BYTES, max_values=MAX_VALUES
            )
        except CheckpointError as broken:
            raise invalid_tokenizer(str(broken.got)) from broken
        validate_tokenizer(document, tokenizers.Regex)
        with library_errors():
            inner = tokenizers.Tokenizer.from_buffer(content)
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, _find_end_ids(folder, inner))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, special ones included; a model's embedding may be larger."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Int[np.ndarray, " n"]:
        """Return the tokens of a text, int32.

        Args:
            text: special tokens in it are parsed.
            add_special_tokens: whether to add the special tokens of the file, such as BOS.
        """
        with library_errors():
            encoding = self.inner.encode(text, add_special_tokens=add_special_tokens)
        return np.asarray(encoding.ids, np.int32)

    def decode(self, ids: Iterable[int] | np.ndarray, *, keep_special_tokens: bool = False) -> str:
        """Return the text of tokens; invalid UTF-8 becomes U+FFFD.

        Args:
            ids: token ids.
            keep_special_tokens: whether special tokens are included in the text.
        """
        plain = [int(token) for token in ids]
        with library_errors():
            return self.inner.decode(plain, skip_special_tokens=not keep_special_tokens)

    def stream(self, stop: Sequence[str] = ()) -> "TextStream":
        """Return a streaming decoder.

        Args:
            stop: texts that end the stream.
        """
        return TextStream(self, stop)


class TextStream:
    """Streaming decoder; incomplete characters and possible starts of stop strings are held back.

    The text ends before the stop string that is complete first, however tokens divide it.

    Args:
        tokenizer: used for decoding.
        stop: texts that end the stream, none of them empty.

    Attributes:
        is_stopped: whether a stop string has been reached.
        text: all text that was returned.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self.is_stopped, self.text = False, ""
        self._held = ""  # may be the start of a stop string
        # The text of a token may depend on earlier ones (such as a leading space), so new tokens
        # are decoded together with those of the last emitted text.
        self._emitted: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int | np.integer) -> str:
        """Add a token and return the new text, which may be empty."""
        self._pending.append(int(token))
        return self._release(is_last=False)

    def finish(self) -> str:
        """Return the text that was held back, complete or not."""
        return self._release(is_last=True)

    def _release(self, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        text = self._held + self._new_text(is_last=is_last)
        places = [(text.find(stop) + len(stop), text.find(stop)) for stop in self._stop]
        places = [(end, start) for end, start in places if start >= 0]
        self.is_stopped = bool(places)
        shown = len(text)
        if places:
            shown = min(places)[1]
        elif not is_last:
            shown -= max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[shown:]
        self.text += text[:shown]
        return text[:shown]

    def _new_text(self, *, is_last: bool) -> str:
        decode = self._tokenizer.decode
        text = decode(self._emitted + self._pending)
        if text.endswith(_INCOMPLETE) and not is_last:
            return ""
        new = text[len(decode(self._emitted)) :]
        self._emitted = self._pending if new else self._emitted + self._pending
        self._pending = []
        return new


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text that a stop string may start with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _find_end_ids(folder: CheckpointFolder, inner: Any) -> tuple[int, ...]:
    ids: set[int] = set()
    for name in filter(folder.has, _ID_FILES):
        value = folder.json(name, max_bytes=MAX_SETTINGS_BYTES).get("eos_token_id")
        listed = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(each) is int and 0 <= each < 2**31 for each in listed):
            raise CheckpointError(
                "eos-id", f"{name} has an invalid eos_token_id",
                got=f"eos_token_id: {value!r}"[:200],
                expected="a token id, a list of them, or null",
                fix=f"correct eos_token_id in {name}",
            )  # fmt: skip
        ids |= set(listed)
    if folder.has(_TOKEN_FILE):
        token = folder.json(_TOKEN_FILE, max_bytes=MAX_SETTINGS_BYTES).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        token_id = inner.token_to_id(token) if isinstance(token, str) else None
        if token is not None and token_id is None:
            raise CheckpointError(
                "eos-token", f"eos_token of {_TOKEN_FILE} is not in {TOKENIZER}",
                got=f"eos_token: {token!r}"[:200], expected="a token of the vocabulary, or null",
                fix="take both files from the same version of the model",
            )  # fmt: skip
        ids |= set() if token_id is None else {token_id}
    return tuple(sorted(ids))
