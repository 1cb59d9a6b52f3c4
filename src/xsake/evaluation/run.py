"""Evaluation loop: build the trials, score those that are not cached, build the report."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from xsake._progress import ProgressFn
from xsake._provenance import checkout_root, environment, installed_versions, source_digest
from xsake.errors import ArgumentError
from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import Texts
from xsake.evaluation.measure import Measurement, digest_key, forward_cost, measure
from xsake.evaluation.record import (
    CachedResult,
    EvaluationReport,
    ModelIdentity,
    ResultCache,
)
from xsake.evaluation.score import Scorer
from xsake.evaluation.summary import context_result, far_copy_result
from xsake.evaluation.trial import (
    PASSAGE,
    Encode,
    TokenizedTexts,
    Trial,
    WindowSet,
    cut_windows,
    far_copies,
)
from xsake.hads import PlanAttention
from xsake.model import Decoder
from xsake.model.tokenizer import Tokenizer

# Sources that determine the results; their digest is part of cache keys.
SOURCES = (
    "attention", "evaluation/score.py", "hads/sparse_attention.py", "hads/budget.py",
    "hads/topk.py", "hads/plan.py", "hads/selectors", "kernels", "layout", "masks", "model", "nsa",
)  # fmt: skip
_MINIMUMS = {
    "contexts": 16, "documents": 1, "windows_per_document": 1, "gaps": 0, "far_copy_samples": 1,
    "passage": 2, "seed": 0,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class EvalModel:
    """Model under evaluation.

    Args:
        model: the decoder with its weights.
        encode: from a text to token ids.
        identity: of the model files.
        dtype: of weights and activations.
        opening: token ids at the start of every sequence, such as BOS.
        tokenizer: that `encode` belongs to; None: no text can be generated.
    """

    model: Decoder
    encode: Encode
    identity: ModelIdentity
    dtype: str = "float32"
    opening: tuple[int, ...] = ()
    tokenizer: Tokenizer | None = None


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """Evaluation settings.

    Args:
        contexts: tokens per window; one evaluation each.
        documents: maximum number of documents per context; None: all.
        windows_per_document: consecutive windows from the start of a document.
        gaps: of the far-copy probe; empty: no probe.
        far_copy_samples: passages of the probe.
        passage: tokens of a passage.
        seed: of the probe and of the intervals.
    """

    contexts: tuple[int, ...]
    documents: int | None = None
    windows_per_document: int = 1
    gaps: tuple[int, ...] = (512, 2048, 4096)
    far_copy_samples: int = 2
    passage: int = PASSAGE
    seed: int = 0

    def __post_init__(self):
        check_minimums(self, _MINIMUMS)
        if not self.contexts:
            raise ArgumentError(
                "no-context", "no context to evaluate", expected="at least one context"
            )


def check_minimums(settings: Any, minimums: dict[str, int]) -> None:
    """Raise for settings below their minimum, and for duplicates."""
    for name, minimum in minimums.items():
        value = getattr(settings, name)
        values = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(value < minimum for value in values) or len(set(values)) < len(values):
            got, expected = f"{name}={value}", f">= {minimum}, no duplicates"
            raise ArgumentError(
                "evaluation-settings", "invalid evaluation settings", got=got, expected=expected
            )


def evaluate(
    eval_model: EvalModel,
    texts: Texts,
    settings: EvaluationSettings,
    *,
    candidate: Candidate | None = None,
    cache: ResultCache | None = None,
    on_progress: ProgressFn = lambda _: None,
) -> EvaluationReport:
    """Evaluate perplexity, KL and far copies of a model with dense and with candidate attention.

    Args:
        eval_model: the model.
        texts: to evaluate on.
        settings: of the evaluation.
        candidate: attention to compare with dense attention; None: dense only.
        cache: of results, for resuming.
        on_progress: called after each trial.
    """
    cache, config = ResultCache() if cache is None else cache, eval_model.model.config
    notes = validate_evaluation(eval_model, settings.contexts, candidate)
    encode, opening = eval_model.encode, eval_model.opening
    tokenized = TokenizedTexts(texts.documents, encode, config.vocab_size, opening)
    window_sets = cut_window_sets(tokenized, settings, notes)
    used = dict.fromkeys(document for windows in window_sets for document in windows.documents)
    copies, skipped = far_copies(
        tokenized, list(used), settings.gaps, samples=settings.far_copy_samples,
        passage=settings.passage, seed=settings.seed,
        max_tokens=config.context if config.has_learned_positions else None,
        tokens=None if candidate is None else candidate.tokens,
    ) if settings.gaps else ([], [])  # fmt: skip
    copies = sorted(copies, key=lambda copy: (copy.gap, copy.sample))
    base = {
        "model": eval_model.identity.digest,
        "dtype": eval_model.dtype,
        "candidate": None if candidate is None else candidate.digest,
        "versions": measured_versions(),
        "source": source_digest(*SOURCES),
    }
    trials = [trial for windows in window_sets for trial in windows.trials]
    trials += [copy.trial for copy in copies]
    score = Scorer(eval_model.model, None if candidate is None else candidate.attend)
    items = _measurements(eval_model.model, trials, score, base)
    results = iter(measure(items, cache, on_progress))
    take = lambda items: list(itertools.islice(results, len(items)))
    contexts = [context_result(x, take(x.trials), candidate, settings.seed) for x in window_sets]
    by_gap = [list(group) for _, group in itertools.groupby(copies, lambda copy: copy.gap)]
    probes = [far_copy_result(group, take(group), settings.passage) for group in by_gap]
    return EvaluationReport(
        **describe_run(eval_model, texts, base["versions"], base["source"]),
        seed=settings.seed,
        document_limit=settings.documents,
        windows_per_document=settings.windows_per_document,
        candidate=None if candidate is None else candidate.identity,
        contexts=tuple(contexts),
        far_copy=tuple(probes),
        notes=(*notes, *skipped),
        seconds=sum(result.seconds for result in (*contexts, *probes)),
    )  # fmt: skip


def measured_versions() -> dict[str, str]:
    """Return the versions of the packages that compute the results."""
    return environment().versions | installed_versions(("flax", "tokenizers"))


def describe_run(
    eval_model: EvalModel, texts: Texts, versions: dict[str, str], source: str
) -> dict[str, Any]:
    """Return the fields that all reports have: model, texts, machine and code."""
    current = environment(checkout_root())
    return {
        "made_at": current.utc, "model": eval_model.identity, "texts": texts.files,
        "dtype": eval_model.dtype, "versions": versions, "source": source,
        "commit": current.commit, "dirty": current.dirty, "processor": current.cpu,
    }  # fmt: skip


def validate_evaluation(
    eval_model: EvalModel, contexts: Sequence[int], candidate: Candidate | None
) -> list[str]:
    """Validate the arguments; return warnings."""
    config, longest = eval_model.model.config, max(contexts)
    if candidate is not None and isinstance(candidate.attend, PlanAttention):
        candidate.attend.plan.validate_for(
            config.layers, config.q_heads, kv_heads=config.kv_heads, head_dim=config.head_dim
        )
    if candidate is not None and candidate.tokens is not None:
        others = [x for x in contexts if x != candidate.tokens]
        if others:
            raise ArgumentError(
                "candidate-length",
                "the candidate supports one length only",
                got=f"contexts {', '.join(map(str, others))}",
                expected=f"context {candidate.tokens}",
                fix="evaluate a layout at its own length",
            )
    if longest <= config.context:
        return []
    if config.has_learned_positions:
        raise ArgumentError(
            "evaluation-context",
            "the context exceeds the model's position embeddings",
            got=f"context {longest}",
            expected=f"at most {config.context}",
        )
    return [f"context {longest} exceeds the training context of {config.context}"]


def cut_window_sets(
    tokenized: TokenizedTexts, settings: EvaluationSettings, notes: list[str]
) -> list[WindowSet]:
    """Cut the windows of every context; contexts without a window only get a note."""
    window_sets = []
    for context in settings.contexts:
        windows = cut_windows(
            tokenized, context, per_document=settings.windows_per_document, limit=settings.documents
        )
        if windows.too_short:
            counts = f"{windows.too_short} of {windows.too_short + len(windows.documents)}"
            notes.append(f"context {context}: skipped documents with too few tokens: {counts}")
        if windows.trials:
            window_sets.append(windows)
        else:
            notes.append(f"context {context}: no document is long enough, nothing was evaluated")
    if not window_sets:
        raise ArgumentError(
            "evaluation-documents",
            "no document is long enough",
            got=f"{len(tokenized.documents)} documents",
            expected=f"at least {min(settings.contexts)} tokens in one of them",
            fix="use a smaller --context or longer texts",
        )
    return window_sets


def _measurements(
    model: Decoder, trials: Sequence[Trial], score: Callable, base: dict
) -> list[Measurement]:
    return [
        Measurement(
            key=digest_key(base | {"trial": trial.digest}),
            label=trial.label,
            cost=forward_cost(model, len(trial.tokens)),
            compute=lambda trial=trial: {"sums": score(trial.tokens).sums(trial.spans)},
            describe=functools.partial(_format_nll, trial),
        )
        for trial in trials
    ]


def _format_nll(trial: Trial, entry: CachedResult) -> str:
    predicted = sum(end - start for start, end in trial.spans)
    sides = [(side, entry.sums.get(f"{side}_nll")) for side in ("dense", "candidate")]
    return ", ".join(f"NLL {sum(x) / predicted:.3f} {side}" for side, x in sides if x is not None)
