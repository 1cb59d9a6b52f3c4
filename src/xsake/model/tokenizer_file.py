"""Validate a tokenizer.json before it is passed to the package tokenizers."""

import base64
import binascii
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

from xsake.errors import CheckpointError

TOKENIZER = "tokenizer.json"
MAX_VALUES = 2**23  # the largest vocabularies, 262,144 tokens, take 1.8 million
MAX_STEPS = 64  # of a normalizer, decoder or template
MAX_EXPANSION = 4096  # output characters per input character of normalizers and decoders
MAX_ID = 2**31 - 1  # ids are int32

_TREES = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


def validate_tokenizer(document: dict[str, Any], compile_pattern: Callable[[str], Any]) -> None:
    """Reject a tokenizer with unbounded text expansion, invalid patterns or ids beyond int32.

    Catastrophic backtracking of a pattern is not detected here; Oniguruma aborts it after about a
    second per text, which `library_errors` reports.

    Args:
        document: the parsed tokenizer.json.
        compile_pattern: `tokenizers.Regex`, which raises a plain Exception.
    """
    for name in _TREES:
        steps = list(_steps(document.get(name)))
        if len(steps) > MAX_STEPS:
            raise invalid_tokenizer(
                f"{name}: {len(steps)} steps, at most {MAX_STEPS} are supported"
            )
        for step in steps:
            _check_pattern(name, step, compile_pattern)
        expansion = math.prod(_max_expansion(step) for step in steps)
        if expansion > MAX_EXPANSION:
            raise invalid_tokenizer(
                f"{name}: one character may become {expansion:,}, limit {MAX_EXPANSION}"
            )
    for token, number in _ids(document):
        if type(number) is not int or not 0 <= number <= MAX_ID:
            got = f"the id of {token!r:.60} is {number!r:.30}, not in 0 to {MAX_ID}"
            raise invalid_tokenizer(got)


@contextlib.contextmanager
def library_errors() -> Iterator[None]:
    """Convert exceptions of the package tokenizers to CheckpointError.

    It raises plain exceptions, and Rust panics, which derive from BaseException and whose type
    cannot be imported.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not is_panic and type(error) not in (Exception, ValueError, OverflowError):
            raise
        raise invalid_tokenizer(str(error)) from error


def invalid_tokenizer(got: str) -> CheckpointError:
    """Return the error for an invalid tokenizer.json."""
    return CheckpointError(
        "tokenizer", f"invalid {TOKENIZER}",
        got=got[:300], expected="a file written by the package tokenizers",
        fix="copy or download the file again",
    )  # fmt: skip


def _steps(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer, pre-tokenizer, post-processor or decoder, nested too."""
    stack = [tree]
    while stack:
        step = stack.pop()
        if isinstance(step, dict):
            yield step
            stack += [part for value in step.values() if isinstance(value, list) for part in value]


def _check_pattern(name: str, step: dict[str, Any], compile_pattern: Callable) -> None:
    pattern = step.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if isinstance(regex, str):
        try:
            compile_pattern(regex)
        except Exception as error:  # the library raises plain exceptions
            raise invalid_tokenizer(f"{name}: the pattern {regex!r:.100}: {error}") from error


def _max_expansion(step: dict[str, Any]) -> int:
    """Return the maximum output characters per input character of a step."""
    match step:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(pattern)}}:
            return -(-len(content) // len(pattern)) or 1 if pattern else len(content) + 1
        case {"type": "Replace", "content": str(content)}:
            return len(content) + 1  # a pattern may match the empty string everywhere
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            return _longest_mapping(charsmap)
    return 1


def _longest_mapping(charsmap: str) -> int:
    """Return the longest replacement in a SentencePiece map: a trie, then NUL-terminated texts."""
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_tokenizer(f"precompiled_charsmap: {error}") from error
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
