"""The model of a folder, ready to be measured; what it needs is imported when it is asked for."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from xsake.errors import MissingExtraError


def evaluation_library() -> ModuleType:
    """`xsake.evaluation`, which needs more than the base install."""
    try:
        from xsake import evaluation
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "models need more packages", got=error.name, fix="pip install 'xsake[model]'"
        ) from error
    return evaluation


def subject_of(folder: Path, dtype: str) -> Any:
    """An `evaluation.Subject` from a Hugging Face checkpoint."""
    from xsake.evaluation import Subject, identify
    from xsake.model.huggingface import load
    from xsake.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    loaded = load(folder, compute_dtype=dtype, param_dtype=dtype)
    opening = opening_of(tokenizer.encode)
    return Subject(loaded.model, tokenizer.encode, identify(folder), dtype, opening)


def opening_of(encode: Callable) -> tuple[int, ...]:
    """What the tokenizer puts before any text: whatever comes before the text's own tokens."""
    bare, whole = encode("a").tolist(), encode("a", adds_special=True).tolist()
    starts = range(len(whole) - len(bare) + 1)
    return tuple(next((whole[:i] for i in starts if whole[i : i + len(bare)] == bare), []))
