"""Text to token ids and back by a checkpoint's own tokenizer.json, all at once or as it comes."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from xsake.errors import CheckpointError, MissingExtraError
from xsake.model.huggingface.files import Folder, parse_object
from xsake.model.tokenizer_file import (
    MAX_VALUES,
    TOKENIZER,
    library_errors,
    require_sound,
    unsound,
)

MAX_TOKENIZER_BYTES, MAX_SETTINGS_BYTES = 2**27, 2**24

# Three files may name the end: models of one text and models of many turns differ in which do.
_IDS_IN = ("config.json", "generation_config.json")
_WORDS_IN = "tokenizer_config.json"
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """The tokenizer of a checkpoint.

    Args:
        inner: a `tokenizers.Tokenizer`.
        end_ids: tokens after which there is nothing more, ascending.
    """

    inner: Any
    end_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """The tokenizer in a checkpoint's directory.

        Args:
            directory: has tokenizer.json; config.json, generation_config.json and
                tokenizer_config.json may name the tokens that end a text.

        Returns:
            A tokenizer that neither truncates nor pads, whatever the file asks for.
        """
        tokenizers = _package()
        folder = Folder.at(directory)
        path = folder.file(TOKENIZER)
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise unsound(f"{path.stat().st_size} bytes, at most {MAX_TOKENIZER_BYTES} are read")
        content = path.read_bytes()
        try:
            document = parse_object(
                content, TOKENIZER, max_bytes=MAX_TOKENIZER_BYTES, max_values=MAX_VALUES
            )
        except CheckpointError as broken:
            raise unsound(str(broken.got)) from broken
        require_sound(document, tokenizers.Regex)
        with library_errors():
            inner = tokenizers.Tokenizer.from_buffer(content)
        inner.no_truncation()
        inner.no_padding()
        return cls(inner, _end_ids(folder, inner))

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, special ones included; a model's table may be longer."""
        return self.inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, adds_special: bool = False) -> Int[np.ndarray, " n"]:
        """The tokens of a text, int32.

        Args:
            text: where it spells a special token, it means that token.
            adds_special: whether to put around it what the file says belongs there, such as a
                token that opens every text.
        """
        with library_errors():
            found = self.inner.encode(text, add_special_tokens=adds_special)
        return np.asarray(found.ids, np.int32)

    def decode(self, ids: Iterable[int] | np.ndarray, *, shows_special: bool = False) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            shows_special: whether special tokens are spelled out; they leave nothing otherwise.
        """
        plain = [int(token) for token in ids]
        with library_errors():
            return self.inner.decode(plain, skip_special_tokens=not shows_special)

    def streaming(self) -> "TextStream":
        """A decoder that is given one token after the other."""
        return TextStream(self)


class TextStream:
    """Text that grows token by token; half a character waits until the rest of it has come.

    Args:
        tokenizer: decodes.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # How a token reads may depend on what stands before it (a leading space, say), so new
        # tokens are decoded together with those that made the last piece of text.
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int | np.integer) -> str:
        """What can be shown now that this token is there; often a word, sometimes nothing."""
        self._pending.append(int(token))
        return self._new_text(is_last=False)

    def finish(self) -> str:
        """What was held back, complete or not."""
        return self._new_text(is_last=True)

    def _new_text(self, *, is_last: bool) -> str:
        decode = self._tokenizer.decode
        text = decode(self._shown + self._pending)
        if text.endswith(_UNFINISHED) and not is_last:
            return ""
        new = text[len(decode(self._shown)) :]
        self._shown = self._pending if new else self._shown + self._pending
        self._pending = []
        return new


def _package() -> Any:
    try:
        import tokenizers
    except ModuleNotFoundError as missing:
        raise MissingExtraError(
            "reading tokenizer.json needs the package tokenizers",
            fix='pip install "xsake[model]"',
        ) from missing
    return tokenizers


def _end_ids(folder: Folder, inner: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for name in _IDS_IN:
        if folder.has(name):
            settings = folder.json(name, max_bytes=MAX_SETTINGS_BYTES)
            found |= _ids(name, settings.get("eos_token_id"))
    if folder.has(_WORDS_IN):
        word = folder.json(_WORDS_IN, max_bytes=MAX_SETTINGS_BYTES).get("eos_token")
        found |= _id_of(inner, word.get("content") if isinstance(word, dict) else word)
    return tuple(sorted(found))


def _ids(name: str, value: Any) -> set[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise CheckpointError(
            f"{name} does not say properly which tokens end a text",
            got=f"eos_token_id: {value!r}"[:200],
            expected="a token id, a list of them, or null",
            fix=f"correct eos_token_id in {name}",
        )
    return set(ids)


def _id_of(inner: Any, word: Any) -> set[int]:
    if word is None:
        return set()
    known = inner.token_to_id(word) if isinstance(word, str) else None
    if known is None:
        raise CheckpointError(
            f"{_WORDS_IN} ends texts with a token that {TOKENIZER} does not have",
            got=f"eos_token: {word!r}"[:200],
            expected="one of its tokens, or null",
            fix="take both files from the same version of the model",
        )
    return {known}
