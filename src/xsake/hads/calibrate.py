"""Calibration: run a model on documents, measure every head, build the profile."""

import dataclasses
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from xsake._io import atomic_write
from xsake._progress import Progress, ProgressFn
from xsake._provenance import checkout_root, environment, source_digest
from xsake.errors import ArgumentError
from xsake.hads import curves as fit
from xsake.hads.budget import ForcedBlocks
from xsake.hads.hooks import (
    ComponentMoments,
    LayerMasses,
    ObserveFn,
    make_mass_hook,
    moments_hook,
)
from xsake.hads.profile import CalibratedModel, DocumentRecord, Profile
from xsake.hads.selectors import Sampled, Selector
from xsake.hads.sensitivity import make_effect_hook
from xsake.layout.grid import count_blocks


class DocumentMasses(NamedTuple):
    """Attention masses of a document; X: heads of all layers."""

    entropy: Float[np.ndarray, " X"]
    true: Float[np.ndarray, "X n n"]
    estimates: dict[str, Float[np.ndarray, "X n n"]]


class MassCache:
    """Cache of document masses by key, stored as the causal triangle in float16.

    Args:
        folder: of the files; None: in memory.
        overwrite: ignore existing files.
    """

    def __init__(self, folder: Path | None = None, *, overwrite: bool = False):
        self._folder, self._overwrite = folder, overwrite
        self._memory: dict[str, dict[str, np.ndarray]] = {}

    def __contains__(self, key: str) -> bool:
        if self._folder is None or self._overwrite:
            return key in self._memory
        return _load_arrays(self._path(key)) is not None

    def put(self, key: str, masses: DocumentMasses) -> None:
        """Store a document; the file is complete when this returns."""
        arrays = {"entropy": masses.entropy.astype(np.float32), "true": _pack(masses.true)}
        arrays |= {f"estimate {name}": _pack(m) for name, m in masses.estimates.items()}
        self._put(key, arrays)

    def get(self, key: str) -> DocumentMasses:
        """Return a stored document."""
        arrays = self._get(key)
        estimates = [name for name in arrays if name.startswith("estimate ")]
        return DocumentMasses(
            arrays["entropy"],
            _unpack(arrays["true"]),
            {name.removeprefix("estimate "): _unpack(arrays[name]) for name in estimates},
        )

    def put_effects(self, key: str, effects: dict[str, Float[np.ndarray, "X levels"]]) -> None:
        """Store the effects of a document, by selector."""
        self._put(key, {name: each.astype(np.float32) for name, each in effects.items()})

    def effects(self, key: str) -> dict[str, Float[np.ndarray, "X levels"]]:
        """Return stored effects."""
        return self._get(key)

    def _put(self, key: str, arrays: dict[str, np.ndarray]) -> None:
        if self._folder is None:
            self._memory[key] = arrays
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path(key), _npz_bytes(arrays))
        except OSError as error:
            raise ArgumentError(
                "cannot write the calibration cache",
                got=f"{self._folder}: {error.strerror}",
                expected="a writable folder",
                fix="choose another path with -o",
            ) from error

    def _get(self, key: str) -> dict[str, np.ndarray]:
        arrays = self._memory.get(key) if self._folder is None else _load_arrays(self._path(key))
        assert arrays is not None, "key not in the cache"
        return arrays

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


def _pack(masses: Float[np.ndarray, "X n n"]) -> np.ndarray:
    rows, columns = np.tril_indices(masses.shape[-1])
    return masses[:, rows, columns].astype(np.float16)


def _unpack(packed: np.ndarray) -> Float[np.ndarray, "X n n"]:
    n = int((np.sqrt(8 * packed.shape[-1] + 1) - 1) / 2 + 0.5)
    masses = np.zeros((len(packed), n, n), np.float32)
    rows, columns = np.tril_indices(n)
    masses[:, rows, columns] = packed
    return masses


def _npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _load_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Return the arrays of a file; None if it is missing or incomplete."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile):
        return None
    except OSError as error:
        raise ArgumentError(
            "cannot read the calibration cache", got=f"{path}: {error.strerror}"
        ) from error


# Sources that determine the measurements; their digest is part of cache keys.
SOURCES = (
    "hads/hooks.py", "hads/selectors", "attention", "kernels", "layout", "masks", "model", "nsa",
)  # fmt: skip
MOMENT_TOKENS = 1024  # tokens per document for the component moments
COPY_DIVISOR = 8  # a copy has 1 / COPY_DIVISOR of the document's tokens


@dataclasses.dataclass(frozen=True)
class CalibrationDocument:
    """Tokens of one calibration document."""

    name: str
    tokens: Int[np.ndarray, " T"]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.asarray(self.tokens, "<i4").tobytes()).hexdigest()


Documents = Sequence[CalibrationDocument]


def append_copy(document: CalibrationDocument) -> CalibrationDocument:
    """Return the document with its last tokens replaced by a copy of its first.

    Example:
        >>> append_copy(CalibrationDocument("counting", np.arange(16))).tokens.tolist()[-4:]
        [12, 13, 0, 1]
    """
    copied = len(document.tokens) // COPY_DIVISOR
    tokens = np.concatenate(
        [document.tokens[: len(document.tokens) - copied], document.tokens[:copied]]
    )
    return CalibrationDocument(f"{document.name}, ending with a copy", tokens)


@dataclasses.dataclass(frozen=True)
class CalibrationSettings:
    """Calibration settings.

    Args:
        block: tokens of a query block and of a kv block.
        forced: blocks that every head computes.
        selectors: to calibrate.
        effect_documents: number of documents, in the order of digests, on which the effect of
            heads on predictions is measured with gradients (3 to 4 times the time). 0: none.
        copied_documents: number of those that end with a copy of their beginning. Ordinary text
            seldom needs long-range copies, so heads that find them would get few blocks.
        batch_size: documents per forward pass, usually the number of devices.
    """

    block: int = 64
    forced: ForcedBlocks = ForcedBlocks()
    selectors: tuple[Selector, ...] = (Sampled(),)
    effect_documents: int = 0
    copied_documents: int = 0
    batch_size: int = 1


def calibrate(
    observe: ObserveFn,
    model: CalibratedModel,
    documents: Sequence[CalibrationDocument],
    settings: CalibrationSettings = CalibrationSettings(),  # noqa: B008 (frozen)
    *,
    cache: MassCache | None = None,
    on_progress: ProgressFn = lambda _: None,
) -> Profile:
    """Measure the attention of every head and the accuracy of selectors.

    The profile does not depend on the order of the documents, the number of devices or
    interruptions: documents are summed in the order of their digests.

    Args:
        observe: runs the model with a hook; see `xsake.model.Observer` and `hads.observer`. Effects
            also require its method `grads`, an `hooks.GradsFn`.
        model: identity of the model.
        documents: of equal length.
        settings: what to measure.
        cache: of measured documents; None: in memory.
        on_progress: called after each batch.
    """
    documents = sorted(_validate(documents, settings), key=lambda document: document.sha256)
    if settings.effect_documents:
        _require_grads(observe)
    cache = MassCache() if cache is None else cache
    components = _rank_components(observe, documents, settings)
    keys = [_key(model, document, settings, components) for document in documents]
    chosen = [
        append_copy(document) if index < settings.copied_documents else document
        for index, document in enumerate(documents[: settings.effect_documents])
    ]
    progress = ProgressTracker(len(documents) + len(chosen), on_progress)
    _measure_masses(observe, documents, keys, settings, components, cache, progress)
    n = count_blocks(len(documents[0].tokens), settings.block)
    weights = _fit_corrections(model, keys, n, settings, cache)
    args = settings, components, weights
    effects = _measure_effects(observe, model, chosen, *args, cache, progress) if chosen else {}
    return _build_profile(model, documents, keys, settings, components, weights, effects, cache)


def _validate(documents: Documents, settings: CalibrationSettings) -> Documents:
    lengths = {len(document.tokens) for document in documents}
    if len(lengths) != 1:
        raise ArgumentError(
            "calibration documents must have the same length",
            got=f"lengths {sorted(lengths)}" if lengths else "no document",
            expected="at least one document, all of the same number of tokens",
        )
    n = count_blocks(min(lengths), settings.block)
    if n <= settings.forced.blocks_per_row:
        raise ArgumentError(
            "the documents are too short for block selection",
            got=f"{min(lengths)} tokens, {n} blocks of {settings.block}",
            expected=f"more than the {settings.forced.blocks_per_row} forced blocks",
            fix="use longer documents or smaller blocks",
        )
    names: dict[str, str] = {}
    for document in documents:
        if document.sha256 in names:
            raise ArgumentError(
                "duplicate calibration document",
                got=f"{names[document.sha256]} and {document.name}",
                expected="every text once",
            )
        names[document.sha256] = document.name
    return documents


def _batches(count: int, batch_size: int) -> list[list[int]]:
    """Return batches of indices; the last index is repeated to fill the last batch."""
    starts = range(0, count, batch_size)
    return [[min(start + i, count - 1) for i in range(batch_size)] for start in starts]


def _rank_components(
    observe: ObserveFn, documents: Documents, settings: CalibrationSettings
) -> Int[np.ndarray, "L Hk D"]:
    """Return components of queries and keys by descending contribution to scores."""
    spread = 0.0
    for batch in _batches(len(documents), settings.batch_size):
        tokens = np.stack([documents[i].tokens[:MOMENT_TOKENS] for i in batch])
        moments: ComponentMoments = observe(jax.numpy.asarray(tokens), moments_hook)
        queries, keys = (np.asarray(x, np.float64) for x in moments)
        for row in range(len(set(batch))):
            spread = spread + queries[:, row] * keys[:, row]
    # A stable sort: constant components keep their order.
    return np.argsort(-spread, axis=-1, kind="stable").astype(np.int32)


def _key(model: CalibratedModel, document: CalibrationDocument, settings, components) -> str:
    """Return the cache key of a document's masses."""
    return json.dumps({
        "model": model.digest,
        "tokens": document.sha256,
        "block": settings.block,
        "selectors": [repr(selector) for selector in settings.selectors],
        "components": hashlib.sha256(components.tobytes()).hexdigest(),
        "versions": environment().versions,
        "source": source_digest(*SOURCES),
    }, sort_keys=True)  # fmt: skip


class ProgressTracker:
    """Count of measured documents and estimate of the remaining time."""

    def __init__(self, total: int, on_progress: ProgressFn):
        self._total, self._on_progress = total, on_progress
        self._done, self._new, self._spent = 0, 0, 0.0

    def skip(self, count: int) -> None:
        """Count cached documents."""
        if count:
            self._done += count
            self._send("earlier runs", None)

    def add(self, names: Sequence[str], seconds: float) -> None:
        """Count documents that were measured in `seconds`."""
        self._done, self._new = self._done + len(names), self._new + len(names)
        self._spent += seconds
        self._send(names[-1], self._spent / self._new * (self._total - self._done))

    def _send(self, label: str, remaining: float | None) -> None:
        state = self._done, self._total, label, remaining is not None, self._spent, remaining
        self._on_progress(Progress(*state))


def _measure_missing(documents, keys, batch_size: int, cache, progress, measure) -> None:
    """Call `measure(tokens, rows, unique)` for documents that are not in the cache.

    `rows` are document indices of the rows of `tokens`, the last one repeated to fill a batch;
    `unique` are the same without repetition.
    """
    missing = [i for i, key in enumerate(keys) if key not in cache]
    progress.skip(len(keys) - len(missing))
    for batch in _batches(len(missing), batch_size):
        begin = time.monotonic()
        rows = [missing[i] for i in batch]
        unique = list(dict.fromkeys(rows))
        tokens = jax.numpy.asarray(np.stack([documents[i].tokens for i in rows]))
        measure(tokens, rows, unique)
        progress.add([documents[i].name for i in unique], time.monotonic() - begin)


def _measure_masses(observe, documents, keys, settings, components, cache, progress) -> None:
    selectors = {selector.name: selector for selector in settings.selectors}
    hook = make_mass_hook(settings.block, selectors, components)

    def measure(tokens, _, unique) -> None:
        masses: LayerMasses = observe(tokens, hook)
        for row, index in enumerate(unique):
            cache.put(keys[index], document_masses(masses, row))

    _measure_missing(documents, keys, settings.batch_size, cache, progress, measure)


def _fit_corrections(
    model: CalibratedModel, keys, n: int, settings: CalibrationSettings, cache: MassCache
) -> dict[str, Float[np.ndarray, "X 3"]]:
    """Fit the correction weights of each selector."""
    fits = {s.name: fit.Correction(model.heads, n, settings.forced) for s in settings.selectors}
    for key in keys:
        document = cache.get(key)
        for name, correction in fits.items():
            correction.add(document.true, document.estimates[name])
    return {name: correction.weights() for name, correction in fits.items()}


def _measure_effects(
    observe, model: CalibratedModel, documents, settings, components, weights, cache, progress
) -> dict[str, Float[np.ndarray, "X levels"]]:
    """Measure the effect of heads on predictions, mean over documents, by selector."""
    heads = (model.layers, model.q_heads)
    by_head = {name: each.reshape(*heads, -1) for name, each in weights.items()}
    selectors = {selector.name: selector for selector in settings.selectors}
    hook = make_effect_hook(selectors, by_head, components, settings.block, settings.forced)
    digests = [source_digest("hads/sensitivity.py"), repr(settings.forced)]
    digests += [hashlib.sha256(each.tobytes()).hexdigest() for each in weights.values()]
    keys = [f"effects {digests} {_key(model, x, settings, components)}" for x in documents]
    levels = count_blocks(len(documents[0].tokens), settings.block) + 1

    def measure(tokens, rows, unique) -> None:
        seeds = jax.numpy.asarray([int(documents[i].sha256[:7], 16) for i in rows])
        shape = (model.layers, len(rows), model.q_heads, levels)
        zeros = {name: jax.numpy.zeros(shape, jax.numpy.float32) for name in selectors}
        effects = jax.tree.map(np.asarray, observe.grads(tokens, seeds, hook, zeros))
        for row, index in enumerate(unique):
            each = {name: x[:, row].reshape(-1, levels) for name, x in effects.items()}
            cache.put_effects(keys[index], each)

    _measure_missing(documents, keys, settings.batch_size, cache, progress, measure)
    parts = [cache.effects(key) for key in keys]
    return {name: np.mean([x[name].astype(np.float64) for x in parts], axis=0) for name in weights}


def _require_grads(observe) -> None:
    if not hasattr(observe, "grads"):
        raise ArgumentError(
            "cannot measure the effect of heads on predictions",
            got=f"{type(observe).__name__} without `grads`",
            expected="xsake.model.Observer, hads.observer, or an object with `grads`",
            fix="calibrate with CalibrationSettings(effect_documents=0)",
        )


def document_masses(masses: LayerMasses, row: int) -> DocumentMasses:
    """Return one document of a batch, layers and heads flattened."""
    flat = lambda x: np.asarray(x[:, row]).reshape(-1, *x.shape[3:])
    estimates = {name: flat(each) for name, each in masses.estimates.items()}
    return DocumentMasses(flat(masses.entropy), flat(masses.true), estimates)


def _build_profile(
    model: CalibratedModel, documents, keys, settings, components, weights, effects, cache
) -> Profile:
    context = len(documents[0].tokens)
    forced, count = settings.forced, len(keys)
    names = [selector.name for selector in settings.selectors]
    summaries, entropy = [], 0.0
    curves: dict[str, Any] = dict.fromkeys(("oracle", *names), 0.0)
    for key in keys:
        document = cache.get(key)
        entropy = entropy + document.entropy.astype(np.float64) / count
        summaries.append(fit.summarise(document.true, forced))
        for name in curves:
            order = document.true
            if name != "oracle":
                order = fit.correct_estimates(document.estimates[name], weights[name])
            curves[name] = curves[name] + fit.loss_curve(document.true, order, forced) / count
    heads = (model.layers, model.q_heads)
    by_head = lambda x: np.asarray(x).reshape(*heads, *np.shape(x)[1:])
    mean: dict[str, Any] = {
        field.name: by_head(np.mean([getattr(s, field.name) for s in summaries], axis=0))
        for field in dataclasses.fields(fit.HeadSummary)
    }
    return Profile(
        model=model,
        documents=tuple(
            DocumentRecord(name=document.name, sha256=document.sha256, tokens=context)
            for document in documents
        ),
        context=context,
        block=settings.block,
        forced=forced,
        seed=0,
        environment=environment(checkout_root()),
        entropy=by_head(entropy),
        curves={name: by_head(values) for name, values in curves.items()},
        effects={name: by_head(values) for name, values in effects.items()},
        selector_weights={name: by_head(values) for name, values in weights.items()},
        components=components,
        **mean,
    )
