"""Load a checkpoint for evaluation; optional dependencies are imported lazily."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from xsake.errors import MissingExtraError


def import_evaluation() -> ModuleType:
    """Import `xsake.evaluation`, which needs the `model` extra."""
    try:
        from xsake import evaluation
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "models need optional packages", got=error.name, fix="pip install 'xsake[model]'"
        ) from error
    return evaluation


def load_eval_model(folder: Path, dtype: str) -> Any:
    """Load an `evaluation.EvalModel` from a Hugging Face checkpoint."""
    from xsake.evaluation import EvalModel, identify
    from xsake.model.huggingface import load
    from xsake.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    loaded = load(folder, compute_dtype=dtype, param_dtype=dtype)
    prefix = bos_prefix(tokenizer.encode)
    return EvalModel(loaded.model, tokenizer.encode, identify(folder), dtype, prefix)


def bos_prefix(encode: Callable) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer prepends to a text."""
    bare, whole = encode("a").tolist(), encode("a", add_special_tokens=True).tolist()
    starts = range(len(whole) - len(bare) + 1)
    return tuple(next((whole[:i] for i in starts if whole[i : i + len(bare)] == bare), []))
