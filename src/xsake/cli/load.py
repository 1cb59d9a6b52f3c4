"""Load models, texts, plans and option values; optional dependencies are imported lazily."""

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from xsake import _json, masks
from xsake.errors import ArgumentError, MissingExtraError

MAX_BYTES = 2**28  # limit of a mask or layout file
PROFILE = ".profile.json"  # replaces the suffix of a plan


def import_extra(module: str, extra: str = "model") -> ModuleType:
    """Import a module that needs the packages of an extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            "command-extra",
            f"{module} needs optional packages",
            got=error,
            fix=f"pip install 'xsake[{extra}]'",
        ) from error


def load_eval_model(folder: Path, dtype: str, *, on_host: bool = False) -> Any:
    """Load an `evaluation.EvalModel` from a Hugging Face checkpoint.

    Args:
        folder: of the checkpoint.
        dtype: of weights and activations.
        on_host: keep the weights in host memory.
    """
    import jax

    from xsake.evaluation import EvalModel, identify
    from xsake.model.huggingface import load
    from xsake.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    with jax.default_device(jax.devices("cpu")[0] if on_host else None):
        loaded = load(folder, compute_dtype=dtype, param_dtype=dtype)
    prefix = bos_prefix(tokenizer.encode)
    return EvalModel(loaded.model, tokenizer.encode, identify(folder), dtype, prefix, tokenizer)


def bos_prefix(encode: Callable) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer prepends to a text."""
    bare, whole = encode("a").tolist(), encode("a", add_special_tokens=True).tolist()
    starts = range(len(whole) - len(bare) + 1)
    return tuple(next((whole[:i] for i in starts if whole[i : i + len(bare)] == bare), []))


class CalibrationInputs(NamedTuple):
    """Model with per-layer hooks, its identity, and tokenized documents."""

    observe: Any
    model: Any
    documents: list[Any]


def load_calibration(
    folder: Path, texts: list[Path], context: int, max_documents: int, dtype: str,
    devices: int = 1, *, stream_layers: bool = False,
) -> CalibrationInputs:  # fmt: skip
    """Load a model and tokenize the documents of a calibration.

    Args:
        folder: of the checkpoint.
        texts: files and folders.
        context: tokens of a document.
        max_documents: that are used.
        dtype: of weights and activations.
        devices: number of devices.
        stream_layers: keep the weights in host memory; devices share every layer, not documents.
    """
    import jax
    from jax.sharding import Mesh

    from xsake import evaluation, hads
    from xsake.evaluation.trial import TokenizedTexts, cut_windows
    from xsake.model.observer import Observer, StreamingObserver

    documents = evaluation.read_texts(texts).documents
    subject = load_eval_model(folder, dtype, on_host=stream_layers)
    config = subject.model.config
    tokenized = TokenizedTexts(documents, subject.encode, config.vocab_size, subject.opening)
    trials = cut_windows(tokenized, context, limit=max_documents).trials
    if not trials:
        raise ArgumentError(
            "document-length",
            "no document is long enough",
            got=f"{len(documents)} documents",
            expected=f"at least {context} tokens in one of them",
            fix="reduce --context, or provide longer texts",
        )
    available = jax.devices()
    if devices > len(available):
        raise ArgumentError(
            "device-count", "too few devices", got=devices, expected=f"at most {len(available)}"
        )
    names = "layers", "q_heads", "kv_heads", "head_dim"
    model = hads.CalibratedModel(
        name=subject.identity.name,
        digest=subject.identity.digest,
        **{name: getattr(config, name) for name in names},
    )
    used = available[:devices] if devices > 1 else None
    if stream_layers:
        mesh = None if used is None else Mesh(used, ("tensor",))
        observe = StreamingObserver(subject.model, mesh=mesh)
    else:
        observe = Observer(subject.model, devices=used)
    inputs = [hads.CalibrationDocument(trial.document, trial.tokens) for trial in trials]
    return CalibrationInputs(observe, model, inputs)


def load_candidate(mask: str | None, plan: Path | None, layout: Path | None = None) -> Any:
    """Load an `evaluation.Candidate` from the option that was given; None without one."""
    from xsake.evaluation import Candidate
    from xsake.hads import SparsityPlan
    from xsake.layout import BlockLayout

    options = {"--mask": mask, "--layout": layout, "--plan": plan}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ArgumentError(
            "one-attention",
            "only one attention can be chosen",
            got=" and ".join(given),
            expected=f"one of {', '.join(options)}",
        )
    if plan is not None:
        return Candidate.of_plan(SparsityPlan.load(plan))
    if layout is not None:
        return Candidate.of_layout(BlockLayout.from_json(_read_text(layout)))
    return None if mask is None else Candidate.of_mask(_load_mask(mask))


def _load_mask(text: str) -> masks.AbstractMask:
    """Parse a mask expression, or load a mask from a .json file."""
    if not text.endswith(".json"):
        return masks.parse(text)
    content = _read_text(Path(text))
    try:
        description = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            "input-file-json", "the file is not JSON", got=f"{text}: {str(error)[:100]}"
        ) from error
    return masks.from_dict(description)


def _read_text(path: Path) -> str:
    data = _json.read(path, max_bytes=MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise ArgumentError(
            "input-file-size", "the file is too large", got=path, expected=f"{MAX_BYTES} bytes"
        )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(
            "input-file-utf8", "the file is not UTF-8", got=f"{path}: {error}"
        ) from error


def load_profile(plan: Path, profile: Path | None) -> Any:
    """Load a profile; default: at the plan's path with the suffix of profiles, None if absent."""
    from xsake.hads import Profile

    default = plan.with_suffix(PROFILE)
    if profile is None and not default.exists():
        return None
    return Profile.load(profile or default)


def parse_density(text: str, option: str = "density") -> float:
    """Parse a share written as 30% or 0.3."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as error:
        raise ArgumentError(
            "option-share", f"invalid {option}", got=text, expected="30% or 0.3"
        ) from error
    return round(number, 9)


def parse_ints(option: str, text: str, minimum: int = 0) -> tuple[int, ...]:
    """Parse comma-separated integers."""
    try:
        numbers = tuple(int(number) for number in text.split(","))
    except ValueError as error:
        raise ArgumentError(
            "option-ints", f"invalid {option}", got=text, expected="such as 1024,4096"
        ) from error
    if min(numbers) < minimum:
        raise ArgumentError(
            "option-ints-range", f"invalid {option}", got=text, expected=f"at least {minimum}"
        )
    return numbers


def set_cpu_affinity(num_threads: int | None) -> int:
    """Pin this process to `num_threads` cores and return their number; call before JAX starts."""
    if not hasattr(os, "sched_setaffinity"):
        return num_threads or os.cpu_count() or 1
    cores = sorted(os.sched_getaffinity(0))
    if num_threads is None:
        return len(cores)
    if num_threads > len(cores):
        raise ArgumentError(
            "core-count", "too few CPU cores", got=num_threads, expected=f"at most {len(cores)}"
        )
    os.sched_setaffinity(0, set(cores[:num_threads]))
    return num_threads
