"""Results from the sums of trials: means, perplexities, differences and intervals."""

from collections.abc import Sequence

import numpy as np

from xsake.evaluation.bootstrap import estimate
from xsake.evaluation.candidate import Candidate
from xsake.evaluation.far_copy import FarCopy
from xsake.evaluation.journal import CachedResult
from xsake.evaluation.record import (
    ContextResult,
    DenseComparison,
    Estimate,
    FarCopyResult,
    FarCopySample,
    SpanResult,
)
from xsake.evaluation.trial import TokenSpan
from xsake.evaluation.windows import WindowSet


def context_result(
    windows: WindowSet, entries: Sequence[CachedResult], candidate: Candidate | None, seed: int
) -> ContextResult:
    """Summarize all windows of one length."""
    spans = windows.trials[0].spans
    sums = _document_sums(windows, entries)

    def perplexity(name: str) -> Estimate:
        return estimate(lambda x: np.exp(_mean(x, name)), sums, seed)

    def mean(name: str) -> Estimate:
        return estimate(lambda x: _mean(x, name), sums, seed)

    comparison = None
    if candidate is not None:
        nll = "dense_nll", "candidate_nll"
        comparison = DenseComparison(
            budget=candidate.budget(windows.context),
            perplexity=perplexity("candidate_nll"),
            perplexity_difference=estimate(
                lambda x: np.exp(_mean(x, nll[1])) - np.exp(_mean(x, nll[0])), sums, seed
            ),
            nll_difference=estimate(lambda x: _mean(x, nll[1]) - _mean(x, nll[0]), sums, seed),
            kl=mean("kl"),
            agreement=mean("agreement"),
        )
    return ContextResult(
        context=windows.context,
        windows=len(windows.trials),
        documents=tuple(document.name for document in windows.documents),
        too_short=windows.too_short,
        perplexity=perplexity("dense_nll"),
        comparison=comparison,
        by_position=tuple(span_result(span, i, entries) for i, span in enumerate(spans)),
        seconds=sum(entry.seconds for entry in entries),
    )


def far_copy_result(
    copies: Sequence[FarCopy], entries: Sequence[CachedResult], passage: int
) -> FarCopyResult:
    """Summarize all samples with one gap."""
    first, second = copies[0].trial.spans
    return FarCopyResult(
        gap=copies[0].gap,
        passage=passage,
        samples=tuple(map(_sample, copies, entries)),
        first=span_result(first, 0, entries),
        second=span_result(second, 1, entries),
        seconds=sum(entry.seconds for entry in entries),
    )


def _sample(copy: FarCopy, entry: CachedResult) -> FarCopySample:
    means = {
        f"{copies}_{name}": entry.sums[name][index] / (span.end - span.start)
        for name in ("dense_nll", "candidate_nll")
        if name in entry.sums
        for index, (copies, span) in enumerate(
            zip(("first", "second"), copy.trial.spans, strict=True)
        )
    }
    return FarCopySample(where=copy.trial.document, **means)


def span_result(span: TokenSpan, index: int, entries: Sequence[CachedResult]) -> SpanResult:
    """Compute means over one span of every trial."""
    count = (span.end - span.start) * len(entries)
    means = {
        name: sum(entry.sums[name][index] for entry in entries) / count for name in entries[0].sums
    }
    return SpanResult(start=span.start, end=span.end, tokens=count, **means)


_SUMS = ("tokens", "dense_nll", "candidate_nll", "kl", "agreement")


def _mean(totals: np.ndarray, name: str) -> np.ndarray | np.float64:
    return totals[..., _SUMS.index(name)] / totals[..., 0]


def _document_sums(windows: WindowSet, entries: Sequence[CachedResult]) -> np.ndarray:
    """Return float64 sums [documents, _SUMS] over the windows of each document."""
    rows = {document.name: np.zeros(len(_SUMS)) for document in windows.documents}
    for trial, entry in zip(windows.trials, entries, strict=True):
        predicted = sum(end - start for start, end in trial.spans)
        parts = [sum(entry.sums.get(name, [])) for name in _SUMS[1:]]
        rows[trial.document] += np.array([predicted, *parts], np.float64)
    return np.stack(list(rows.values()))
