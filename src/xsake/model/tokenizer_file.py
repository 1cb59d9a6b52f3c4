"""Checks of a tokenizer.json before the package tokenizers obeys it."""

import base64
import binascii
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from xsake.errors import CheckpointError

TOKENIZER = "tokenizer.json"
MAX_VALUES = 2**23  # of the file: the largest vocabularies, 262,144 tokens, take 1.8 million
MAX_STEPS = 64  # of a normalizer, and likewise of a decoder and a template
MAX_GROWTH = 4096  # characters that normalizing or decoding may make of one
MAX_ID = 2**31 - 1  # ids are int32

_TREES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def require_sound(document: dict[str, Any], compile_pattern: Callable[[str], Any]) -> None:
    """Refuse a tokenizer whose rules multiply any text, cannot be compiled, or have no int32 ids.

    A pattern that backtracks without end is not found here; Oniguruma gives it up after about a
    second for each text, which `library_errors` makes a refusal.

    Args:
        document: the parsed tokenizer.json.
        compile_pattern: `tokenizers.Regex`, which raises a plain Exception.
    """
    for name in _TREES:
        steps = list(_steps(document.get(name)))
        if len(steps) > MAX_STEPS:
            raise unsound(f"{name}: {len(steps)} steps, at most {MAX_STEPS} are applied")
        for step in steps:
            _require_pattern(name, step, compile_pattern)
        growth = math.prod(_growth(step) for step in steps)
        if growth > MAX_GROWTH:
            raise unsound(f"{name}: one character may become {growth:,}, at most {MAX_GROWTH}")
    for word, number in _ids(document):
        if type(number) is not int or not 0 <= number <= MAX_ID:
            raise unsound(f"the id of {word!r:.60} is {number!r:.30}, not one of 0 to {MAX_ID}")


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Turn what the package tokenizers raises into a refusal of the file.

    It raises plain exceptions, and panics of Rust, which derive from BaseException alone and
    whose type cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and type(error) not in (Exception, ValueError, OverflowError):
            raise
        raise unsound(str(error)) from error


def unsound(got: str) -> CheckpointError:
    """The error for a tokenizer.json that cannot be used."""
    return CheckpointError(
        f"{TOKENIZER} cannot be read",
        got=got[:300],
        expected="what the package tokenizers saves",
        fix="copy or download the file again",
    )


def _steps(tree: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer, post-processor or decoder, nested ones included."""
    waiting = [tree]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            yield step
            waiting += [
                part for value in step.values() if isinstance(value, list) for part in value
            ]


def _require_pattern(name: str, step: dict[str, Any], compile_pattern: Callable) -> None:
    pattern = step.get("pattern")
    words = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(words, str):
        try:
            compile_pattern(words)
        except Exception as error:  # the library raises nothing narrower
            raise unsound(f"{name}: the pattern {words!r:.100}: {error}") from error


def _growth(step: dict[str, Any]) -> int:
    """How many characters a step may make of one; those that add a fixed number count as 1."""
    match step:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(pattern)}}:
            return -(-len(content) // len(pattern)) or 1 if pattern else len(content) + 1
        case {"type": "Replace", "content": str(content)}:
            return len(content) + 1  # a pattern may match between any two characters
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return _longest_mapping(charsmap)
    return 1


def _longest_mapping(charsmap: str) -> int:
    """Bytes of the longest text in a map of SentencePiece: a trie, then texts that a NUL ends."""
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError) as error:
        raise unsound(f"precompiled_charsmap: {error}") from error
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _ids(document: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    model, added = document.get("model"), document.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.items()
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and "id" in token:
            yield token.get("content"), token["id"]
