"""Runs an evaluation: cuts the trials, measures what is not known yet, and makes the report."""

import dataclasses
import hashlib
import itertools
import json
import time
from collections.abc import Callable, Sequence

import jax

from xsake._provenance import (
    environment,
    installed_versions,
    own_checkout,
    source_digest,
)
from xsake.errors import ArgumentError
from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import Texts
from xsake.evaluation.far_copy import PASSAGE, FarCopy, far_copies
from xsake.evaluation.journal import Entry, Journal
from xsake.evaluation.record import CandidateIdentity, ModelIdentity, Report
from xsake.evaluation.score import Score, Scorer
from xsake.evaluation.summary import context_result, far_copy_result
from xsake.evaluation.trial import Trial
from xsake.evaluation.windows import Cut, Encode, Library, cut_windows
from xsake.hads import Planned
from xsake.model import Decoder

# What decides a number.
SOURCES = (
    "attention", "evaluation/score.py", "hads/attend.py", "hads/budget.py", "hads/choose.py",
    "hads/plan.py", "hads/selectors", "kernels", "layout", "masks", "model",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is evaluated.

    Args:
        model: the decoder, with its weights.
        encode: from a text to token ids.
        identity: which model it is.
        dtype: of weights and activations, for the record.
        opening: token ids that open every sequence it reads, such as a token for the beginning.
    """

    model: Decoder
    encode: Encode
    identity: ModelIdentity
    dtype: str = "float32"
    opening: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is asked.

    Args:
        contexts: tokens per window; each is an evaluation of its own.
        documents: the first so many that are long enough, for each context; None: all.
        windows_per_document: consecutive windows from the start of a document.
        gaps: of the far-copy probe; none: no probe.
        far_copy_samples: passages of the probe.
        passage: tokens of a passage of the probe.
        seed: of the probe's texts and of the intervals.
    """

    contexts: tuple[int, ...]
    documents: int | None = None
    windows_per_document: int = 1
    gaps: tuple[int, ...] = (512, 2048, 4096)
    far_copy_samples: int = 2
    passage: int = PASSAGE
    seed: int = 0

    def __post_init__(self):
        least = {
            "contexts": (self.contexts, 16),
            "documents": ((self.documents,) if self.documents is not None else (), 1),
            "windows_per_document": ((self.windows_per_document,), 1),
            "gaps": (self.gaps, 0),
            "far_copy_samples": ((self.far_copy_samples,), 1),
            "passage": ((self.passage,), 2),
            "seed": ((self.seed,), 0),
        }
        for name, (numbers, lowest) in least.items():
            if any(number < lowest for number in numbers) or len(set(numbers)) < len(numbers):
                got, expected = f"{name}={getattr(self, name)}", f"from {lowest} on, each once"
                raise ArgumentError("this cannot be evaluated", got=got, expected=expected)
        if not self.contexts:
            raise ArgumentError("there is nothing to evaluate", expected="at least one context")


@dataclasses.dataclass(frozen=True)
class Progress:
    """A trial has been answered: told to whoever watches.

    Args:
        done, total: trials.
        label: which one it was.
        is_new: measured now, not known from before.
        dense_nll, candidate_nll: its mean over the spans, nats per token.
        elapsed_seconds: since the start.
        remaining_seconds: estimate by the products of a forward pass; None before the first
            measurement.
    """

    done: int
    total: int
    label: str
    is_new: bool
    dense_nll: float | None
    candidate_nll: float | None
    elapsed_seconds: float
    remaining_seconds: float | None


Watch = Callable[[Progress], None]
Cost = Callable[[Trial], int]


def evaluate(
    subject: Subject,
    texts: Texts,
    settings: Settings,
    *,
    candidate: Candidate | None = None,
    journal: Journal | None = None,
    watch: Watch = lambda _: None,
) -> Report:
    """Perplexity, and what perplexity hides, of a model with dense and with another attention.

    Args:
        subject: the model.
        texts: what it reads.
        settings: what is asked.
        candidate: attention to compare with dense attention; None: dense alone.
        journal: keeps answers and knows earlier ones, so that an interrupted run goes on.
        watch: told about every answer.

    Returns:
        The report.
    """
    journal = Journal() if journal is None else journal
    notes = _checked(subject, settings, candidate)
    vocabulary = subject.model.config.vocab_size
    library = Library(texts.documents, subject.encode, vocabulary, subject.opening)
    cuts = _cuts(library, settings, notes)
    copies = _copies(library, cuts, settings, subject, candidate, notes)
    base = _base(subject, candidate)
    trials = [trial for cut in cuts for trial in cut.trials] + [copy.trial for copy in copies]
    score = Scorer(subject.model, None if candidate is None else candidate.attend)
    answers = iter(_measure(trials, score, journal, base, _cost_in(subject.model), watch))
    contexts = [
        context_result(cut, _take(answers, cut.trials), candidate, settings.seed) for cut in cuts
    ]
    by_gap = [list(group) for _, group in itertools.groupby(copies, lambda copy: copy.gap)]
    probes = [far_copy_result(group, _take(answers, group), settings.passage) for group in by_gap]
    here = environment(own_checkout())
    return Report(
        made_at=here.utc,
        model=subject.identity,
        texts=texts.files,
        dtype=subject.dtype,
        seed=settings.seed,
        document_limit=settings.documents,
        windows_per_document=settings.windows_per_document,
        candidate=None if candidate is None else CandidateIdentity(
            description=candidate.description, digest=candidate.digest, tokens=candidate.tokens
        ),
        contexts=tuple(contexts),
        far_copy=tuple(probes),
        notes=tuple(notes),
        seconds=sum(result.seconds for result in (*contexts, *probes)),
        versions=base["versions"],
        source=base["source"],
        commit=here.commit,
        dirty=here.dirty,
        processor=here.cpu,
    )  # fmt: skip


def _checked(subject: Subject, settings: Settings, candidate: Candidate | None) -> list[str]:
    """Notes on what is unusual; what cannot be done raises before anything is computed."""
    config, longest = subject.model.config, max(settings.contexts)
    if candidate is not None and isinstance(candidate.attend, Planned):
        candidate.attend.plan.validate_for(
            config.layers, config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim
        )
    if candidate is not None and candidate.tokens is not None:
        others = [x for x in settings.contexts if x != candidate.tokens]
        if others:
            raise ArgumentError(
                "the candidate serves one length only",
                got=f"contexts {', '.join(map(str, others))}",
                expected=f"context {candidate.tokens}",
                fix="evaluate a layout at the length that it was made for",
            )
    if longest <= config.context:
        return []
    if config.has_learned_positions:
        raise ArgumentError(
            "the model has no positions for such a context",
            got=f"context {longest}",
            expected=f"at most {config.context}",
        )
    return [f"context {longest} is beyond the {config.context} that the model was trained for"]


def _cuts(library: Library, settings: Settings, notes: list[str]) -> list[Cut]:
    cuts = []
    for context in settings.contexts:
        cut = cut_windows(
            library,
            context,
            per_document=settings.windows_per_document,
            limit=settings.documents,
        )
        if cut.too_short:
            seen = cut.too_short + len(cut.documents)
            left_out = f"documents left out for too few tokens: {cut.too_short} of {seen}"
            notes.append(f"context {context}: {left_out}")
        if cut.trials:
            cuts.append(cut)
        else:
            notes.append(f"context {context}: no document is long enough, nothing was evaluated")
    if not cuts:
        raise ArgumentError(
            "no document is long enough",
            got=f"{len(library.documents)} documents",
            expected=f"at least {min(settings.contexts)} tokens in one of them",
            fix="ask for a smaller --context, or give longer texts",
        )
    return cuts


def _copies(
    library: Library,
    cuts: list[Cut],
    settings: Settings,
    subject: Subject,
    candidate: Candidate | None,
    notes: list[str],
) -> list[FarCopy]:
    """The probe's sequences, by gap; from the documents that windows were cut from."""
    if not settings.gaps:
        return []
    used = dict.fromkeys(document for cut in cuts for document in cut.documents)
    config = subject.model.config
    copies, left_out = far_copies(
        library,
        list(used),
        settings.gaps,
        samples=settings.far_copy_samples,
        passage=settings.passage,
        seed=settings.seed,
        most=config.context if config.has_learned_positions else None,
        tokens=None if candidate is None else candidate.tokens,
    )
    notes += left_out
    return sorted(copies, key=lambda copy: (copy.gap, copy.sample))


def _base(subject: Subject, candidate: Candidate | None) -> dict:
    """All that an answer depends on beside the trial itself."""
    optional = installed_versions(("flax", "tokenizers"))
    return {
        "model": subject.identity.digest,
        "dtype": subject.dtype,
        "candidate": None if candidate is None else candidate.digest,
        "versions": environment().versions | optional,
        "source": source_digest(*SOURCES),
    }


def _measure(
    trials: Sequence[Trial], score: Score, journal: Journal, base: dict, cost: Cost, watch: Watch
) -> list[Entry]:
    """Answer all trials, the cheapest first, so that an estimate of the rest comes early."""
    keys = [_key(base, trial) for trial in trials]
    costs = [
        0 if journal.find(key) else cost(trial) for key, trial in zip(keys, trials, strict=True)
    ]
    start, spent, left = time.monotonic(), 0, sum(costs)
    answers: dict[int, Entry] = {}
    for place in sorted(range(len(trials)), key=costs.__getitem__):
        key, trial = keys[place], trials[place]
        entry = journal.find(key)
        is_new = entry is None
        if entry is None:
            begin = time.monotonic()
            sums = score(trial.tokens).sums(trial.spans)
            entry = Entry(key=key, seconds=time.monotonic() - begin, sums=sums)
            journal.add(entry)
            spent, left = spent + costs[place], left - costs[place]
        answers[place] = entry
        elapsed = time.monotonic() - start
        to_go = elapsed / spent * left if spent else None
        dense, candidate = (_mean_nll(trial, entry, side) for side in ("dense", "candidate"))
        done = Progress(
            len(answers), len(trials), trial.label, is_new, dense, candidate, elapsed, to_go
        )
        watch(done)
    return [answers[place] for place in range(len(trials))]


def _cost_in(model: Decoder) -> Cost:
    """Products of a forward pass: of the parameters once a token, of attention once a pair."""
    config = model.config
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model))
    width = config.layers * config.q_heads * config.head_dim
    return lambda trial: len(trial.tokens) * (parameters + width * len(trial.tokens))


def _key(base: dict, trial: Trial) -> str:
    text = json.dumps(base | {"trial": trial.digest}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _mean_nll(trial: Trial, entry: Entry, side: str) -> float | None:
    predicted = sum(end - start for start, end in trial.spans)
    sums = entry.sums.get(f"{side}_nll")
    return None if sums is None else sum(sums) / predicted


def _take(answers, trials: Sequence) -> list[Entry]:
    return list(itertools.islice(answers, len(trials)))
