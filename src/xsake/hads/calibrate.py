"""Calibration: lets a model read documents, measures every head and makes the profile."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float, Int

from xsake._provenance import environment, own_checkout, source_digest
from xsake.errors import ArgumentError
from xsake.hads import fit
from xsake.hads.budget import AlwaysOn
from xsake.hads.effect import tap_effects
from xsake.hads.measure import LayerMasses, Moments, Observe, watch_masses, watch_moments
from xsake.hads.profile import CalibratedModel, CalibrationDocument, Profile
from xsake.hads.selectors import Sampled, Selector
from xsake.hads.shelf import DocumentMasses, Shelf
from xsake.layout.grid import blocks_of

# What decides a number.
SOURCES = ("hads/measure.py", "hads/selectors", "attention", "kernels", "layout", "masks", "model")
GLANCE = 1024  # tokens of a document that tell which components matter
COPIED = 8  # of a document with a copy, one part in so many


@dataclasses.dataclass(frozen=True)
class Reading:
    """The tokens of one document, as many as are read."""

    name: str
    tokens: Int[np.ndarray, " T"]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(np.asarray(self.tokens, "<i4").tobytes()).hexdigest()


def with_copy(reading: Reading) -> Reading:
    """The same document, its last tokens those that it begins with.

    Example:
        >>> with_copy(Reading("counting", np.arange(16))).tokens.tolist()[-4:]
        [12, 13, 0, 1]
    """
    copied = len(reading.tokens) // COPIED
    tokens = np.concatenate(
        [reading.tokens[: len(reading.tokens) - copied], reading.tokens[:copied]]
    )
    return Reading(f"{reading.name}, ending with a copy", tokens)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Args:
        block: tokens of a query block and of a kv block.
        always: blocks that every head computes.
        selectors: whose estimates are compared with the truth.
        effect_documents: the first so many, by their digests, also tell what heads do to the
            model's predictions, which takes gradients: three to four times the time. 0: none.
        copied_documents: so many of those end with a copy of their beginning: ordinary text seldom
            asks for words from far back, and heads that fetch them would count for little.
        at_once: documents that the model reads at a time: how many devices share the work.
    """

    block: int = 64
    always: AlwaysOn = AlwaysOn()
    selectors: tuple[Selector, ...] = (Sampled(),)
    effect_documents: int = 0
    copied_documents: int = 0
    at_once: int = 1


@dataclasses.dataclass(frozen=True)
class Progress:
    """A document has been measured: told to whoever watches.

    Args:
        done, total: documents, those counted twice that are read again for effects.
        label: the last one.
        is_new: measured now, not known from before.
        elapsed_seconds: since the start.
        remaining_seconds: to go; None before anything was measured.
    """

    done: int
    total: int
    label: str
    is_new: bool
    elapsed_seconds: float
    remaining_seconds: float | None


def calibrate(
    observe: Observe,
    model: CalibratedModel,
    readings: Sequence[Reading],
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    *,
    shelf: Shelf | None = None,
    watch: Callable[[Progress], None] = lambda _: None,
) -> Profile:
    """Measure what every head looks at, and how well selectors would have known.

    The order of the documents, the number of devices and any interruption leave the profile as it
    is: documents are summed up in the order of their digests.

    Args:
        observe: lets the model read tokens; see `xsake.model.Observer` and `hads.observer`. To
            measure effects it needs `slopes` as well, of the type `effect.Slopes`.
        model: which model it is.
        readings: the documents, of equal length.
        settings: what is measured.
        shelf: keeps measured documents and knows earlier ones.
        watch: told about every document.
    """
    readings = sorted(_checked(readings, settings), key=lambda reading: reading.sha256)
    if settings.effect_documents:
        _require_slopes(observe)
    shelf = Shelf() if shelf is None else shelf
    components = _components(observe, readings, settings)
    keys = [_key(model, reading, settings, components) for reading in readings]
    chosen = [
        with_copy(reading) if place < settings.copied_documents else reading
        for place, reading in enumerate(readings[: settings.effect_documents])
    ]
    course = Course(len(readings) + len(chosen), watch)
    _measure(observe, readings, keys, settings, components, shelf, course)
    n = blocks_of(len(readings[0].tokens), settings.block)
    weights = _corrections(model, keys, n, settings, shelf)
    effects = {}
    if chosen:
        effects = _effects(observe, model, chosen, settings, components, weights, shelf, course)
    return _profile(model, readings, keys, settings, components, weights, effects, shelf)


def _checked(readings: Sequence[Reading], settings: Settings) -> Sequence[Reading]:
    lengths = {len(reading.tokens) for reading in readings}
    if len(lengths) != 1:
        raise ArgumentError(
            "calibration reads documents of one length",
            got=f"lengths {sorted(lengths)}" if lengths else "no document",
            expected="at least one document, all of the same number of tokens",
        )
    n = blocks_of(min(lengths), settings.block)
    if n <= settings.always.level:
        raise ArgumentError(
            "the documents are too short to choose blocks in",
            got=f"{min(lengths)} tokens, {n} blocks of {settings.block}",
            expected=f"more blocks than the {settings.always.level} that are always on",
            fix="read longer documents or use smaller blocks",
        )
    names: dict[str, str] = {}
    for reading in readings:
        if reading.sha256 in names:
            raise ArgumentError(
                "two documents begin with the same tokens",
                got=f"{names[reading.sha256]} and {reading.name}",
                expected="every text once",
            )
        names[reading.sha256] = reading.name
    return readings


def _batches(count: int, at_once: int) -> list[list[int]]:
    """Indices, `at_once` at a time; the last ones are repeated to fill a batch."""
    starts = range(0, count, at_once)
    return [[min(start + i, count - 1) for i in range(at_once)] for start in starts]


def _components(
    observe: Observe, readings: Sequence[Reading], settings: Settings
) -> Int[np.ndarray, "L Hk D"]:
    """Components of queries and keys, those first that move scores most."""
    spread = 0.0
    for batch in _batches(len(readings), settings.at_once):
        tokens = np.stack([readings[i].tokens[:GLANCE] for i in batch])
        found: Moments = observe(jax.numpy.asarray(tokens), watch_moments)
        queries, keys = (np.asarray(x, np.float64) for x in found)
        for place in range(len(set(batch))):
            spread = spread + queries[:, place] * keys[:, place]
    # Equal spreads, such as those of components that are always 0, keep their order.
    return np.argsort(-spread, axis=-1, kind="stable").astype(np.int32)


def _key(model: CalibratedModel, reading: Reading, settings: Settings, components) -> str:
    """All that the masses of a document depend on."""
    return json.dumps({
        "model": model.digest,
        "tokens": reading.sha256,
        "block": settings.block,
        "selectors": [repr(selector) for selector in settings.selectors],
        "components": hashlib.sha256(components.tobytes()).hexdigest(),
        "versions": environment().versions,
        "source": source_digest(*SOURCES),
    }, sort_keys=True)  # fmt: skip


class Course:
    """How far the work is.

    Args:
        total: documents to come.
        watch: told about every document.
    """

    def __init__(self, total: int, watch: Callable[[Progress], None]):
        self._total, self._watch = total, watch
        self._done, self._new, self._spent = 0, 0, 0.0

    def known(self, count: int) -> None:
        """So many need not be measured."""
        if count:
            self._done += count
            self._watch(Progress(self._done, self._total, "earlier runs", False, self._spent, None))

    def measured(self, names: Sequence[str], seconds: float) -> None:
        """So long took these documents."""
        self._done, self._new = self._done + len(names), self._new + len(names)
        self._spent += seconds
        to_go = self._spent / self._new * (self._total - self._done)
        self._watch(Progress(self._done, self._total, names[-1], True, self._spent, to_go))


def _in_batches(readings, keys, at_once: int, shelf: Shelf, course: Course, measure) -> None:
    """`measure(tokens, places, own)` for documents that the shelf does not know.

    `places` are those of the rows of `tokens`, the last one repeated to fill a batch; `own` are the
    same without repetition.
    """
    missing = [i for i, key in enumerate(keys) if key not in shelf]
    course.known(len(keys) - len(missing))
    for batch in _batches(len(missing), at_once):
        begin = time.monotonic()
        places = [missing[i] for i in batch]
        own = list(dict.fromkeys(places))
        tokens = jax.numpy.asarray(np.stack([readings[i].tokens for i in places]))
        measure(tokens, places, own)
        course.measured([readings[i].name for i in own], time.monotonic() - begin)


def _measure(
    observe, readings, keys, settings: Settings, components, shelf: Shelf, course: Course
) -> None:
    selectors = {selector.name: selector for selector in settings.selectors}
    look = watch_masses(settings.block, selectors, components)

    def measure(tokens, places, own) -> None:
        found: LayerMasses = observe(tokens, look)
        for place, index in enumerate(own):
            shelf.put(keys[index], document_of(found, place))

    _in_batches(readings, keys, settings.at_once, shelf, course, measure)


def _corrections(
    model: CalibratedModel, keys, n: int, settings: Settings, shelf: Shelf
) -> dict[str, Float[np.ndarray, "X 3"]]:
    """The weights of each selector's estimates."""
    found = {s.name: fit.Correction(model.heads, n, settings.always) for s in settings.selectors}
    for key in keys:
        document = shelf.get(key)
        for name, correction in found.items():
            correction.add(document.true, document.estimates[name])
    return {name: correction.weights() for name, correction in found.items()}


def _effects(
    observe,
    model: CalibratedModel,
    readings,
    settings: Settings,
    components,
    weights,
    shelf,
    course,
) -> dict[str, Float[np.ndarray, "X levels"]]:
    """What heads do to predictions, mean over documents, by selector."""
    heads = (model.layers, model.q_heads)
    shaped = {name: each.reshape(*heads, -1) for name, each in weights.items()}
    selectors = {selector.name: selector for selector in settings.selectors}
    tap = tap_effects(selectors, shaped, components, settings.block, settings.always)
    by = [source_digest("hads/effect.py"), repr(settings.always)]
    by += [hashlib.sha256(each.tobytes()).hexdigest() for each in weights.values()]
    keys = [f"effects {by} {_key(model, x, settings, components)}" for x in readings]
    levels = blocks_of(len(readings[0].tokens), settings.block) + 1

    def measure(tokens, places, own) -> None:
        seeds = jax.numpy.asarray([int(readings[i].sha256[:7], 16) for i in places])
        shape = (model.layers, len(places), model.q_heads, levels)
        zeros = {name: jax.numpy.zeros(shape, jax.numpy.float32) for name in selectors}
        found = jax.tree.map(np.asarray, observe.slopes(tokens, seeds, tap, zeros))
        for place, index in enumerate(own):
            each = {name: x[:, place].reshape(-1, levels) for name, x in found.items()}
            shelf.put_effects(keys[index], each)

    _in_batches(readings, keys, settings.at_once, shelf, course, measure)
    parts = [shelf.effects(key) for key in keys]
    return {name: np.mean([x[name].astype(np.float64) for x in parts], axis=0) for name in weights}


def _require_slopes(observe) -> None:
    if not hasattr(observe, "slopes"):
        raise ArgumentError(
            "this model cannot tell what heads do to its predictions",
            got=f"{type(observe).__name__} without `slopes`",
            expected="xsake.model.Observer, hads.observer, or an object with `slopes`",
            fix="calibrate with Settings(effect_documents=0)",
        )


def document_of(found: LayerMasses, place: int) -> DocumentMasses:
    """One document of a batch, its layers and heads in one axis."""
    flat = lambda x: np.asarray(x[:, place]).reshape(-1, *x.shape[3:])
    estimates = {name: flat(masses) for name, masses in found.estimates.items()}
    return DocumentMasses(flat(found.entropy), flat(found.true), estimates)


def _profile(
    model: CalibratedModel, readings, keys, settings, components, weights, effects, shelf: Shelf
) -> Profile:
    context = len(readings[0].tokens)
    always, count = settings.always, len(keys)
    names = [selector.name for selector in settings.selectors]
    summaries, entropy = [], 0.0
    curves: dict[str, Any] = dict.fromkeys(("oracle", *names), 0.0)
    for key in keys:
        document = shelf.get(key)
        entropy = entropy + document.entropy.astype(np.float64) / count
        summaries.append(fit.summarise(document.true, always))
        for name in curves:
            order = document.true
            if name != "oracle":
                order = fit.corrected(document.estimates[name], weights[name])
            curves[name] = curves[name] + fit.curve(document.true, order, always) / count
    heads = (model.layers, model.q_heads)
    shaped = lambda x: np.asarray(x).reshape(*heads, *np.shape(x)[1:])
    mean: dict[str, Any] = {
        field.name: shaped(np.mean([getattr(s, field.name) for s in summaries], axis=0))
        for field in dataclasses.fields(fit.Summary)
    }
    return Profile(
        model=model,
        documents=tuple(
            CalibrationDocument(name=reading.name, sha256=reading.sha256, tokens=context)
            for reading in readings
        ),
        context=context,
        block=settings.block,
        always=always,
        seed=0,
        environment=environment(own_checkout()),
        entropy=shaped(entropy),
        curves={name: shaped(values) for name, values in curves.items()},
        effects={name: shaped(values) for name, values in effects.items()},
        selector_weights={name: shaped(values) for name, values in weights.items()},
        components=components,
        **mean,
    )
