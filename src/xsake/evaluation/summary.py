"""Results from the sums of trials: means, perplexities, differences and bootstrap intervals."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from xsake.evaluation.candidate import Candidate
from xsake.evaluation.record import (
    CachedResult,
    ContextResult,
    DenseComparison,
    Estimate,
    FarCopyResult,
    FarCopySample,
    SpanResult,
)
from xsake.evaluation.trial import FarCopy, TokenSpan, WindowSet

RESAMPLES = 2000
EDGES = (2.5, 97.5)  # percent
SUMS = ("tokens", "dense_nll", "candidate_nll", "kl", "agreement")


def context_result(
    windows: WindowSet, entries: Sequence[CachedResult], candidate: Candidate | None, seed: int
) -> ContextResult:
    """Summarize all windows of one length."""
    sums = _document_sums(windows, entries)

    def mean(name: str, of: Callable = lambda x: x) -> Estimate:
        return estimate(lambda totals: of(_mean(totals, name)), sums, seed)

    def difference(of: Callable = lambda x: x) -> Estimate:
        sides = "candidate_nll", "dense_nll"
        return estimate(lambda x: np.subtract(*(of(_mean(x, name)) for name in sides)), sums, seed)

    comparison = candidate and DenseComparison(
        budget=candidate.budget(windows.context),
        perplexity=mean("candidate_nll", np.exp),
        perplexity_difference=difference(np.exp),
        nll_difference=difference(),
        kl=mean("kl"),
        agreement=mean("agreement"),
    )
    spans = windows.trials[0].spans
    return ContextResult(
        context=windows.context,
        windows=len(windows.trials),
        documents=tuple(document.name for document in windows.documents),
        too_short=windows.too_short,
        perplexity=mean("dense_nll", np.exp),
        comparison=comparison,
        by_position=tuple(_span_result(span, i, entries) for i, span in enumerate(spans)),
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
        samples=tuple(map(_sample_result, copies, entries)),
        first=_span_result(first, 0, entries),
        second=_span_result(second, 1, entries),
        seconds=sum(entry.seconds for entry in entries),
    )


def _sample_result(copy: FarCopy, entry: CachedResult) -> FarCopySample:
    means = {
        f"{which}_{name}": entry.sums[name][index] / (span.end - span.start)
        for name in ("dense_nll", "candidate_nll")
        if name in entry.sums
        for index, (which, span) in enumerate(
            zip(("first", "second"), copy.trial.spans, strict=True)
        )
    }
    return FarCopySample(where=copy.trial.document, **means)


def _span_result(span: TokenSpan, index: int, entries: Sequence[CachedResult]) -> SpanResult:
    """Compute means over one span of every trial."""
    count = (span.end - span.start) * len(entries)
    means = {
        name: sum(entry.sums[name][index] for entry in entries) / count for name in entries[0].sums
    }
    return SpanResult(start=span.start, end=span.end, tokens=count, **means)


def _mean(totals: np.ndarray, name: str) -> np.ndarray | np.float64:
    return totals[..., SUMS.index(name)] / totals[..., 0]


def _document_sums(windows: WindowSet, entries: Sequence[CachedResult]) -> np.ndarray:
    """Return float64 sums [documents, SUMS] over the windows of each document."""
    rows = {document.name: np.zeros(len(SUMS)) for document in windows.documents}
    for trial, entry in zip(windows.trials, entries, strict=True):
        predicted = sum(end - start for start, end in trial.spans)
        parts = [sum(entry.sums.get(name, [])) for name in SUMS[1:]]
        rows[trial.document] += np.array([predicted, *parts], np.float64)
    return np.stack(list(rows.values()))


def estimate(statistic: Callable, sums: Float[np.ndarray, "documents sums"], seed: int) -> Estimate:
    """Estimate a statistic of totals over documents with its 95 % bootstrap interval.

    Whole documents are resampled: tokens of one document are not independent. Statistics of
    several sums use the same resamples, so differences are paired. A single document has no
    interval. The statistic maps totals [..., sums] to numbers [...].

    Example:
        >>> mean = lambda totals: totals[..., 0] / totals[..., 1]
        >>> result = estimate(mean, np.array([[2.0, 1.0], [4.0, 1.0], [6.0, 1.0]]), seed=0)
        >>> result.value, result.low < 4 < result.high
        (4.0, True)
    """
    value, documents = float(statistic(sums.sum(axis=0))), len(sums)
    if documents < 2:
        return Estimate(value=value, low=None, high=None)
    # Counts of each document instead of indices: the totals are one matrix product.
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(documents, np.full(documents, 1 / documents), size=RESAMPLES)
    low, high = np.percentile(statistic(counts @ sums), EDGES)
    return Estimate(value=value, low=float(low), high=float(high))
