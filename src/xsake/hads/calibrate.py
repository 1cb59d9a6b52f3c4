"""Calibration: run a model on documents, measure every head, build the profile."""

import dataclasses
import hashlib
import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from xsake._io import atomic_write
from xsake._progress import Progress, ProgressFn
from xsake._provenance import checkout_root, environment, source_digest
from xsake.errors import ArgumentError
from xsake.hads import curves
from xsake.hads.budget import ForcedBlocks
from xsake.hads.hooks import LayerMasses, ObserveFn, make_mass_hook, moments_hook
from xsake.hads.profile import CalibratedModel, DocumentRecord, Profile
from xsake.hads.selectors import Sampled, Selector
from xsake.hads.sensitivity import make_effect_hook
from xsake.layout.grid import count_blocks

# Sources that determine the measurements; their digest is part of cache keys.
SOURCES = (
    "hads/hooks.py", "hads/selectors", "attention", "kernels", "layout", "masks", "model", "nsa",
)  # fmt: skip
MOMENT_TOKENS = 1024  # tokens per document for the component moments
COPY_DIVISOR = 8  # a copy has 1 / COPY_DIVISOR of the document's tokens

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class CalibrationDocument:
    """Tokens of one calibration document."""

    name: str
    tokens: Int[np.ndarray, " T"]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.asarray(self.tokens, "<i4").tobytes()).hexdigest()


Documents = Sequence[CalibrationDocument]


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


class DocumentMasses(NamedTuple):
    """Attention masses of a document; X: heads of all layers."""

    entropy: Float[np.ndarray, " X"]
    true: Float[np.ndarray, "X n n"]
    estimates: dict[str, Float[np.ndarray, "X n n"]]

    @classmethod
    def of(cls, masses: LayerMasses, row: int) -> "DocumentMasses":
        """Return one document of a batch, layers and heads flattened."""
        flat = lambda x: np.asarray(x[:, row]).reshape(-1, *x.shape[3:])
        estimates = {name: flat(each) for name, each in masses.estimates.items()}
        return cls(flat(masses.entropy), flat(masses.true), estimates)

    def pack(self) -> Arrays:
        """Return the arrays of a cache file: causal triangles in float16."""
        pack = lambda x: x[:, *np.tril_indices(x.shape[-1])].astype(np.float16)
        estimates = {f"estimate {name}": pack(each) for name, each in self.estimates.items()}
        return {"entropy": self.entropy.astype(np.float32), "true": pack(self.true)} | estimates

    @classmethod
    def unpack(cls, arrays: Arrays) -> "DocumentMasses":
        """Return the masses of a cache file."""
        triangles = {name: _unpack(x) for name, x in arrays.items() if name != "entropy"}
        true = triangles.pop("true")
        estimates = {name.removeprefix("estimate "): x for name, x in triangles.items()}
        return cls(arrays["entropy"], true, estimates)


def _unpack(packed: np.ndarray) -> Float[np.ndarray, "X n n"]:
    n = int((np.sqrt(8 * packed.shape[-1] + 1) - 1) / 2 + 0.5)
    masses = np.zeros((len(packed), n, n), np.float32)
    masses[:, *np.tril_indices(n)] = packed
    return masses


class MassCache:
    """Cache of measured arrays by key, in memory or as .npz files.

    Args:
        folder: of the files; None: in memory.
        overwrite: ignore existing files.
    """

    def __init__(self, folder: Path | None = None, *, overwrite: bool = False):
        self._folder, self._overwrite = folder, overwrite
        self._memory: dict[str, Arrays] = {}

    def __contains__(self, key: str) -> bool:
        return not (self._folder and self._overwrite) and self._load(key) is not None

    def __getitem__(self, key: str) -> Arrays:
        arrays = self._load(key)
        assert arrays is not None, "key not in the cache"
        return arrays

    def __setitem__(self, key: str, arrays: Arrays) -> None:
        """Store arrays; the file is complete when this returns."""
        if self._folder is None:
            self._memory[key] = arrays
            return
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            atomic_write(_cache_path(self._folder, key), file.getvalue())
        except OSError as error:
            raise ArgumentError(
                "cache-unwritable",
                "cannot write the calibration cache",
                got=f"{self._folder}: {error.strerror}",
                expected="a writable folder",
                fix="choose another path with -o",
            ) from error

    def _load(self, key: str) -> Arrays | None:
        """Return stored arrays; None if they are missing or incomplete."""
        if self._folder is None:
            return self._memory.get(key)
        path = _cache_path(self._folder, key)
        try:
            with np.load(path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except (FileNotFoundError, ValueError, EOFError, zipfile.BadZipFile):
            return None
        except OSError as error:
            got = f"{path}: {error.strerror}"
            raise ArgumentError(
                "cache-unreadable", "cannot read the calibration cache", got=got
            ) from error


def _cache_path(folder: Path, key: str) -> Path:
    return folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"


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
            also require its method `grads`, a `hooks.GradsFn`.
        model: identity of the model.
        documents: of equal length.
        settings: what to measure.
        cache: of measured documents; None: in memory.
        on_progress: called after each batch.
    """
    documents = sorted(documents, key=lambda document: document.sha256)
    _validate(observe, documents, settings)
    components = _rank_components(observe, documents, settings)
    total = len(documents) + len(documents[: settings.effect_documents])
    cache = MassCache() if cache is None else cache
    run = _Calibration(observe, model, settings, components, cache, total, on_progress)
    keys = run.measure_masses(documents)
    weights = {
        selector.name: curves.fit_correction(
            ((x.true, x.estimates[selector.name]) for x in run.masses(keys)), settings.forced
        )
        for selector in settings.selectors
    }
    effects = run.measure_effects(documents[: settings.effect_documents], weights)
    return run.build_profile(documents, keys, weights, effects)


def append_copy(document: CalibrationDocument) -> CalibrationDocument:
    """Return the document with its last tokens replaced by a copy of its first.

    Example:
        >>> append_copy(CalibrationDocument("counting", np.arange(16))).tokens.tolist()[-4:]
        [12, 13, 0, 1]
    """
    length = len(document.tokens)
    copied = length // COPY_DIVISOR
    tokens = np.concatenate([document.tokens[: length - copied], document.tokens[:copied]])
    return CalibrationDocument(f"{document.name}, ending with a copy", tokens)


def _validate(observe: ObserveFn, documents: Documents, settings: CalibrationSettings) -> None:
    lengths = {len(document.tokens) for document in documents}
    if len(lengths) != 1:
        raise ArgumentError(
            "calibration-lengths",
            "calibration documents must have the same length",
            got=f"lengths {sorted(lengths)}" if lengths else "no document",
            expected="at least one document, all of the same number of tokens",
        )
    require_length(min(lengths), settings.block, settings.forced)
    for one, other in zip(documents, documents[1:], strict=False):
        if one.sha256 == other.sha256:
            raise ArgumentError(
                "calibration-duplicate",
                "duplicate calibration document",
                got=f"{one.name} and {other.name}",
                expected="every text once",
            )
    if settings.effect_documents and not hasattr(observe, "grads"):
        raise ArgumentError(
            "calibration-effects",
            "cannot measure the effect of heads on predictions",
            got=f"{type(observe).__name__} without `grads`",
            expected="xsake.model.Observer, hads.observer, or an object with `grads`",
            fix="calibrate with CalibrationSettings(effect_documents=0)",
        )


def require_length(tokens: int, block: int, forced: ForcedBlocks) -> None:
    """Raise unless a document has more blocks than are forced."""
    n = count_blocks(tokens, block)
    if n <= forced.blocks_per_row:
        raise ArgumentError(
            "calibration-too-short",
            "the documents are too short for block selection",
            got=f"{tokens} tokens, {n} blocks of {block}",
            expected=f"more than the {forced.blocks_per_row} forced blocks",
            fix="use longer documents or smaller blocks",
        )


def _rank_components(
    observe: ObserveFn, documents: Documents, settings: CalibrationSettings
) -> Int[np.ndarray, "L Hk D"]:
    """Return components of queries and keys by descending contribution to scores."""
    spread = 0.0
    for batch in _batches(documents, settings.batch_size):
        tokens = np.stack([document.tokens[:MOMENT_TOKENS] for document in batch])
        moments = observe(jnp.asarray(tokens), moments_hook)
        queries, keys = (np.asarray(x, np.float64) for x in moments)
        for row in range(len({document.sha256 for document in batch})):
            spread = spread + queries[:, row] * keys[:, row]
    # A stable sort: constant components keep their order.
    return np.argsort(-spread, axis=-1, kind="stable").astype(np.int32)


def _batches(documents: Documents, size: int) -> list[list[CalibrationDocument]]:
    """Return batches; the last document is repeated to fill the last one."""
    starts, last = range(0, len(documents), size), len(documents) - 1
    return [[documents[min(start + i, last)] for i in range(size)] for start in starts]


@dataclasses.dataclass
class _Calibration:
    """Measurements of one run: documents that are not cached, counted and timed."""

    observe: Any
    model: CalibratedModel
    settings: CalibrationSettings
    components: Int[np.ndarray, "L Hk D"]
    cache: MassCache
    total: int
    on_progress: ProgressFn
    done: int = 0
    new: int = 0
    seconds: float = 0.0

    def measure_masses(self, documents: Documents) -> list[str]:
        """Measure masses and estimates; returns the cache key of each document."""
        settings = self.settings
        hook = make_mass_hook(settings.block, settings.selectors, self.components)

        def measure(batch: Documents, tokens) -> list[Arrays]:
            masses: LayerMasses = self.observe(tokens, hook)
            return [DocumentMasses.of(masses, row).pack() for row in range(len(batch))]

        return self._measure(documents, "", measure)

    def measure_effects(
        self, documents: Documents, weights: dict[str, Float[np.ndarray, "X 3"]]
    ) -> dict[str, Float[np.ndarray, "X levels"]]:
        """Measure the effect of heads on predictions, mean over documents, by selector."""
        if not documents:
            return {}
        settings, model = self.settings, self.model
        copies = settings.copied_documents
        documents = [*map(append_copy, documents[:copies]), *documents[copies:]]
        by_head = {name: self._by_head(each) for name, each in weights.items()}
        hook = make_effect_hook(
            settings.selectors, by_head, self.components, settings.block, settings.forced
        )
        levels = count_blocks(len(documents[0].tokens), settings.block) + 1

        def measure(batch: Documents, tokens) -> list[Arrays]:
            seeds = jnp.asarray([int(document.sha256[:7], 16) for document in batch])
            shape = (model.layers, len(batch), model.q_heads, levels)
            zeros = {name: jnp.zeros(shape, jnp.float32) for name in weights}
            effects = jax.tree.map(np.asarray, self.observe.grads(tokens, seeds, hook, zeros))
            flat = lambda x, row: x[:, row].reshape(-1, levels).astype(np.float32)
            rows = range(len(batch))
            return [{name: flat(x, row) for name, x in effects.items()} for row in rows]

        digests = [source_digest("hads/sensitivity.py"), repr(settings.forced)]
        digests += [hashlib.sha256(each.tobytes()).hexdigest() for each in weights.values()]
        keys = self._measure(documents, f"effects {digests} ", measure)
        parts = [self.cache[key] for key in keys]
        mean = lambda name: np.mean([part[name].astype(np.float64) for part in parts], axis=0)
        return {name: mean(name) for name in weights}

    def build_profile(self, documents: Documents, keys: Sequence[str], weights, effects) -> Profile:
        """Return the means over documents as a profile."""
        settings, count = self.settings, len(keys)
        forced, summaries, entropy = settings.forced, [], 0.0
        losses: dict[str, Any] = dict.fromkeys(("oracle", *weights), 0.0)
        for document in self.masses(keys):
            entropy = entropy + document.entropy.astype(np.float64) / count
            summaries.append(curves.summarize(document.true, forced))
            for name in losses:
                order = document.true
                if name != "oracle":
                    order = curves.correct_estimates(document.estimates[name], weights[name])
                losses[name] = (
                    losses[name] + curves.loss_curve(document.true, order, forced) / count
                )
        mean: dict[str, Any] = {
            name: self._by_head(np.mean([each[name] for each in summaries], axis=0))
            for name in summaries[0]
        }
        context = len(documents[0].tokens)
        return Profile(
            model=self.model,
            documents=tuple(
                DocumentRecord(name=document.name, sha256=document.sha256, tokens=context)
                for document in documents
            ),
            context=context,
            block=settings.block,
            forced=forced,
            seed=0,
            environment=environment(checkout_root()),
            entropy=self._by_head(entropy),
            curves={name: self._by_head(each) for name, each in losses.items()},
            effects={name: self._by_head(each) for name, each in effects.items()},
            selector_weights={name: self._by_head(each) for name, each in weights.items()},
            components=self.components,
            **mean,
        )

    def _measure(self, documents: Documents, prefix: str, measure: Callable) -> list[str]:
        """Call `measure(batch, tokens)` for documents that are not cached; returns all keys."""
        base = prefix + self._base_key()
        keys = {document.sha256: f"{base} {document.sha256}" for document in documents}
        missing = [document for document in documents if keys[document.sha256] not in self.cache]
        if len(missing) < len(documents):
            self._report(len(documents) - len(missing), "earlier runs", None)
        for batch in _batches(missing, self.settings.batch_size):
            begin = time.monotonic()
            tokens = jnp.asarray(np.stack([document.tokens for document in batch]))
            results: dict[str, Arrays] = {}
            for document, arrays in zip(batch, measure(batch, tokens), strict=True):
                results.setdefault(keys[document.sha256], arrays)
            for key, arrays in results.items():
                self.cache[key] = arrays
            self._report(len(results), batch[-1].name, time.monotonic() - begin)
        return list(keys.values())

    def _base_key(self) -> str:
        return json.dumps({
            "model": self.model.digest,
            "block": self.settings.block,
            "selectors": [repr(selector) for selector in self.settings.selectors],
            "components": hashlib.sha256(self.components.tobytes()).hexdigest(),
            "versions": environment().versions,
            "source": source_digest(*SOURCES),
        }, sort_keys=True)  # fmt: skip

    def _report(self, count: int, label: str, seconds: float | None) -> None:
        """Count documents, cached ones if `seconds` is None, and send the progress."""
        self.done, remaining = self.done + count, None
        if seconds is not None:
            self.new, self.seconds = self.new + count, self.seconds + seconds
            remaining = self.seconds / self.new * (self.total - self.done)
        state = self.done, self.total, label, seconds is not None, self.seconds, remaining
        self.on_progress(Progress(*state))

    def masses(self, keys: Sequence[str]) -> Iterator[DocumentMasses]:
        return (DocumentMasses.unpack(self.cache[key]) for key in keys)

    def _by_head(self, x) -> np.ndarray:
        return np.asarray(x).reshape(self.model.layers, self.model.q_heads, *np.shape(x)[1:])
