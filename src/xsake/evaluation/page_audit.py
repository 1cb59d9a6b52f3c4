"""Audit of page selection: certified and true attention mass that decoding drops, by head.

A prompt is read densely. At some of its tokens, pages are selected as a decoding step does, from
the cache as that step has it: the last page ends with the token. Bounds by `Int8Keys` certify the
dropped mass. The true mass is computed in float64 from the same queries and keys.
"""

import dataclasses
import functools
import time
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from pydantic import Field

from xsake._progress import Progress, ProgressFn
from xsake._provenance import source_digest
from xsake._schema import Frozen
from xsake.attention.layer_call import LayerCall
from xsake.cache import ForcedPages, Int8Keys, PageSelector
from xsake.errors import ArgumentError
from xsake.evaluation.candidate import Candidate
from xsake.evaluation.documents import Texts
from xsake.evaluation.record import (
    CandidateIdentity,
    Count,
    ModelIdentity,
    Seconds,
    Share,
    TextFile,
)
from xsake.evaluation.run import (
    EvalModel,
    EvaluationSettings,
    cut_window_sets,
    describe_run,
    measured_versions,
    validate_evaluation,
)
from xsake.evaluation.trial import TokenizedTexts, position_spans
from xsake.hads import PlanDecoding
from xsake.hads.hooks import ForwardHook
from xsake.hads.sparse_decoding import count_pages, require_certifiable
from xsake.masks import Causal
from xsake.model.cache import PAGE_SIZE, KVCache
from xsake.model.observer import Observer

# Sources that determine the results.
SOURCES = (
    "attention", "cache", "evaluation/page_audit.py", "hads", "kernels", "layout", "masks", "model",
)  # fmt: skip
CHUNK = 16  # tokens whose pages are selected at once
GOLDEN_RATIO = 0.6180339887498949  # the fractional part of its multiples is evenly spread
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@runtime_checkable
class PageSelection(Protocol):
    """Selection of the pages that a decoding step reads, such as `PlanDecoding`."""

    @property
    def page_selector(self) -> PageSelector:
        """Page selector of the cache."""
        ...

    def retrieve(self, q: Float[Array, "B Hq D"], call: LayerCall) -> Int[Array, "B Hk slots"]:
        """Return the pages that a step reads; -1: unused."""
        ...


@dataclasses.dataclass(frozen=True)
class UniformPages:
    """One share of the pages for all kv heads, without a plan.

    Args:
        budget: pages that are read / pages of the sequence.
        selector: of pages.
        forced: pages that are read in any case.
    """

    budget: float
    selector: PageSelector = Int8Keys()
    forced: ForcedPages = ForcedPages()

    def __post_init__(self):
        if not 0 < self.budget <= 1:
            raise ArgumentError(
                "uniform-page-budget", "the budget of pages is a share", got=self.budget,
                expected="above 0, at most 1",
            )  # fmt: skip

    @property
    def page_selector(self) -> PageSelector:
        """See `PageSelection`."""
        return self.selector

    def retrieve(self, q, call):
        """See `PageSelection`."""
        at = call.pages
        count = count_pages(at, jnp.full(at.pages.k.shape[2], self.budget))
        options = {"slots": at.page_table.shape[1], "scale": call.scale, "forced": self.forced}
        return self.selector.retrieve_topk(q, at.summaries, at, count, **options)


@dataclasses.dataclass(frozen=True)
class PageAuditSettings:
    """Settings of an audit.

    Args:
        context: tokens of each document.
        documents: maximum number of documents; None: all.
        positions: tokens of a document that are audited, evenly spaced; None: all.
        eps: share of attention that a query may drop.
    """

    context: int
    documents: int | None = None
    positions: int | None = 64
    eps: float = 0.1

    def __post_init__(self):
        if not 0 < self.eps < 1:
            raise ArgumentError(
                "audit-eps", "eps is a share of the attention mass", got=self.eps,
                expected="above 0 and below 1",
            )  # fmt: skip
        if self.positions is not None and not 0 < self.positions <= self.context:
            raise ArgumentError(
                "audit-positions", "the audited tokens are not in the document",
                got=self.positions, expected=f"1 to {self.context}",
            )  # fmt: skip


class MassSummary(Frozen):
    """Dropped attention mass of some queries, as shares of all attention of a query."""

    mean: Share
    median: Share
    p90: Share
    p99: Share
    max: Share
    within: Share = Field(description="share of the queries that drop at most eps")


class QueryAudit(Frozen):
    """Results of some queries: a query is one token and one query head."""

    queries: Count
    pages: Share = Field(description="pages read / pages of the sequence, summed over tokens")
    certified: MassSummary = Field(description="upper bounds by int8 keys")
    true: MassSummary = Field(description="computed in float64")
    violations: Count = Field(description="queries that drop more than is certified; 0 by proof")


class HeadAudit(QueryAudit):
    """Results of one query head."""

    layer: Count
    head: Count


class SpanAudit(QueryAudit):
    """Results of all heads at tokens `start` to `end`, exclusive."""

    start: Count
    end: Count


class PageAudit(Frozen):
    """Report of `xsake audit` with everything that the results depend on; nothing is random."""

    schema_version: Literal[1] = 1
    made_at: str = Field(description="UTC")
    model: ModelIdentity
    texts: tuple[TextFile, ...]
    dtype: str = Field(description="of weights, activations and cache")
    plan: CandidateIdentity | None = Field(description="None: one budget for all heads")
    selector: str = Field(description="page selector")
    budget: Share = Field(description="pages that steps are to read / pages of a sequence")
    limit: float | None = Field(description="dropped mass until which heads read more pages")
    max_share: Share | None = Field(description="pages that a head may read for the limit / all")
    eps: float = Field(description="dropped mass up to which queries are counted")
    context: Count
    page_size: Count
    positions: Count = Field(description="audited tokens of each document, evenly spaced")
    documents: tuple[str, ...]
    notes: tuple[str, ...] = Field(description="skipped documents and warnings")
    total: QueryAudit
    by_position: tuple[SpanAudit, ...]
    heads: tuple[HeadAudit, ...]
    seconds: Seconds
    versions: dict[str, str]
    source: str = Field(description="digest of the source code that determines the results")
    commit: str | None
    dirty: bool | None
    processor: str


def choose_positions(tokens: int, count: int | None) -> Int[np.ndarray, " P"]:
    """Return a position in each of `count` equal parts of a document; None: all positions.

    Places in the parts differ, so that they are also different places in a page.

    Example:
        >>> choose_positions(32, 4)
        array([ 4,  9, 22, 27])
    """
    count = tokens if count is None else count
    number = np.arange(count)
    return ((number + (number + 1) * GOLDEN_RATIO % 1) * tokens / count).astype(np.int64)


class LayerInputs(NamedTuple):
    """Queries of the audited tokens and all keys, with a leading axis of layers."""

    q: Float[Array, "*L B P Hq D"]
    k: Float[Array, "*L B T Hk D"]


def make_query_hook(positions: int | None) -> ForwardHook:
    """Build a `ForwardHook` that returns queries at some positions, and all keys."""

    def hook(q, k, v, call: LayerCall) -> LayerInputs:
        require_certifiable(call)
        return LayerInputs(q[:, choose_positions(q.shape[1], positions)], k)

    return hook


class MeasuredMasses(NamedTuple):
    """Results by document, layer and token."""

    certified: Float[np.ndarray, "*B L P Hq"]
    true: Float[np.ndarray, "*B L P Hq"]
    pages: Int[np.ndarray, "*B L P Hk"]  # that are read


def measure_document(
    inputs: LayerInputs, selection: PageSelection, positions: Int[np.ndarray, " P"], scale: float
) -> MeasuredMasses:
    """Measure the mass that a selection drops at some tokens of one document.

    Args:
        inputs: of all layers, a batch of 1.
        selection: of pages.
        positions: of the queries.
        scale: factor on q.k.
    """
    cache = _make_cache(inputs.k, selection.page_selector)
    is_certifier = isinstance(selection.page_selector, Int8Keys)
    certifier = cache if is_certifier else _make_cache(inputs.k, Int8Keys())
    k = np.asarray(inputs.k[:, 0])
    parts = []
    for first in range(0, len(positions), CHUNK):
        chosen = np.minimum(np.arange(first, first + CHUNK), len(positions) - 1)
        q, lengths = inputs.q[:, 0, chosen], positions[chosen] + 1
        at = jnp.asarray(lengths, jnp.int32)
        is_read, certified = jax.device_get(_select(selection, scale, cache, certifier, q, at))
        true = [
            dropped_masses(*layer, lengths=lengths, scale=scale, page_size=PAGE_SIZE)
            for layer in zip(np.asarray(q), k, is_read, strict=True)
        ]
        parts.append(MeasuredMasses(certified, np.stack(true), is_read.sum(-1)))
    joined = (np.concatenate(x, axis=1)[:, : len(positions)] for x in zip(*parts, strict=True))
    return MeasuredMasses(*joined)


def dropped_masses(
    q: Float[np.ndarray, "P Hq D"], k: Float[np.ndarray, "T Hk D"],
    is_read: Bool[np.ndarray, "P Hk N"], lengths: Int[np.ndarray, " P"], scale: float,
    page_size: int,
) -> Float[np.ndarray, "P Hq"]:  # fmt: skip
    """Return in float64 the share of attention in pages that are not read.

    Args:
        q: last query of each sequence.
        k: keys; a sequence has the first ones.
        is_read: whether a page is read.
        lengths: tokens of each sequence.
        scale: factor on q.k.
        page_size: tokens of a page.
    """
    keys = k[: lengths.max()].astype(np.float64).transpose(1, 2, 0)  # [Hk, D, T]
    tokens, (count, heads, dim) = keys.shape[-1], q.shape
    queries = np.moveaxis(q.astype(np.float64).reshape(count, len(keys), -1, dim), 1, 0)
    s = scale * (queries.reshape(len(keys), -1, dim) @ keys)
    s = s.reshape(len(keys), count, -1, tokens)  # [Hk, P, G, T]
    is_past = np.arange(tokens)[None] < lengths[:, None]
    s = np.where(is_past[None, :, None], s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    is_dropped = ~np.repeat(np.moveaxis(is_read, 1, 0), page_size, axis=-1)[..., None, :tokens]
    share = np.where(is_dropped, p, 0).sum(-1) / p.sum(-1)
    return np.moveaxis(share, 0, 1).reshape(count, heads)


@functools.partial(jax.jit, static_argnums=1)
def _make_cache(k: Float[Array, "L 1 T Hk D"], selector: PageSelector) -> KVCache:
    """Return the cache of a document, without values, and with free pages for `_fork`."""
    tokens = k.shape[2]
    values = jnp.zeros((*k.shape[:-1], 1), k.dtype)
    capacity = (-(-tokens // PAGE_SIZE) + CHUNK) * PAGE_SIZE
    return KVCache.from_prefill(k, values, jnp.array([tokens]), capacity).with_selector(selector)


def _fork(cache: KVCache, lengths: Int[Array, " P"]) -> KVCache:
    """Return a cache of sequences that begin as its one does, each with a last page of its own."""
    selector, pages = cache.selector, cache.pages
    assert selector is not None
    count = cache.pages.num_pages - lengths.shape[0]
    last = (lengths - 1) // pages.page_size
    own = count + jnp.arange(lengths.shape[0])
    number = jnp.arange(count)[None]
    table = jnp.where(number == last[:, None], own[:, None], number).astype(jnp.int32)
    pages = pages.copy(jnp.stack([last, own], axis=-1))
    forked = dataclasses.replace(cache, pages=pages, page_table=table, lengths=lengths)

    def update(summaries, layer):
        return selector.update(summaries, forked.layer_pages(layer), 1), None

    summaries, _ = jax.lax.scan(update, cache.summaries, jnp.arange(pages.k.shape[0]))
    return dataclasses.replace(forked, summaries=summaries)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _select(
    selection: PageSelection, scale: float, cache: KVCache, certifier: KVCache,
    q: Float[Array, "L P Hq D"], lengths: Int[Array, " P"],
) -> tuple[Bool[Array, "L P Hk N"], Float[Array, "L P Hq"]]:  # fmt: skip
    """Return which pages are read, and the certified dropped mass."""
    cache, certifier = _fork(cache, lengths), _fork(certifier, lengths)
    number = jnp.arange(cache.page_table.shape[1])

    def select_layer(layer_and_q):
        layer, q = layer_and_q

        def select(sequence):  # one at a time, so that a cache of the CPU holds its keys
            q, table, length = (x[None] for x in sequence)
            at, other = (
                x.layer_pages(layer)._replace(page_table=table, lengths=length)
                for x in (cache, certifier)
            )
            pages = selection.retrieve(q, LayerCall(layer, Causal(), scale, pages=at))
            certified = Int8Keys().certify(q, other.summaries, other, pages, scale=scale)
            return (pages[0, ..., None] == number[None, None]).any(1), certified[0]

        return jax.lax.map(select, (q, cache.page_table, cache.lengths))

    return jax.lax.map(select_layer, (jnp.arange(q.shape[0]), q))


def summarize(measured: MeasuredMasses, positions: Int[np.ndarray, " P"], eps: float) -> QueryAudit:
    """Summarize queries of documents with the same positions.

    Args:
        measured: of documents.
        positions: of the tokens.
        eps: share of attention that a query may drop.
    """
    certified, true = measured.certified.astype(np.float64), measured.true
    visible = np.broadcast_to((positions // PAGE_SIZE + 1)[:, None], measured.pages.shape).sum()
    return QueryAudit(
        queries=true.size,
        pages=_round(measured.pages.sum() / visible),
        certified=_summarize(certified, eps),
        true=_summarize(true, eps),
        violations=int((true > certified).sum()),
    )


def _summarize(masses: Float[np.ndarray, "..."], eps: float) -> MassSummary:
    quantiles = np.quantile(masses, list(QUANTILES.values()))
    named = {name: _round(x) for name, x in zip(QUANTILES, quantiles, strict=True)}
    return MassSummary(mean=_round(masses.mean()), within=_round((masses <= eps).mean()), **named)


def _round(number: float) -> float:
    return float(f"{number:.6g}")


def audit_pages(
    eval_model: EvalModel,
    texts: Texts,
    selection: PlanDecoding | UniformPages,
    settings: PageAuditSettings,
    *,
    on_progress: ProgressFn = lambda _: None,
) -> PageAudit:
    """Audit the pages that decoding reads: certified and true dropped mass of every head.

    Args:
        eval_model: the model, with plain causal attention.
        texts: documents.
        selection: of pages.
        settings: of the audit.
        on_progress: called after each document.
    """
    config, start = eval_model.model.config, time.monotonic()
    candidate = Candidate.of_plan(selection.plan) if isinstance(selection, PlanDecoding) else None
    evaluation = EvaluationSettings((settings.context,), settings.documents, gaps=())
    notes = validate_evaluation(eval_model, evaluation.contexts, candidate)
    encode, opening = eval_model.encode, eval_model.opening
    tokenized = TokenizedTexts(texts.documents, encode, config.vocab_size, opening)
    (windows,) = cut_window_sets(tokenized, evaluation, notes)
    positions = choose_positions(settings.context, settings.positions)
    observe, hook = Observer(eval_model.model), make_query_hook(settings.positions)
    parts = []
    for trial in windows.trials:
        inputs = observe(jnp.asarray(trial.tokens)[None], hook)
        parts.append(measure_document(inputs, selection, positions, config.scale))
        done, total = len(parts), len(windows.trials)
        elapsed = time.monotonic() - start
        event = Progress(done, total, trial.label, True, elapsed, elapsed / done * (total - done))
        part = summarize(parts[-1], positions, settings.eps)
        detail = f"{part.certified.within:.1%} of queries certified, {part.violations} violations"
        on_progress(dataclasses.replace(event, detail=detail))
    measured = MeasuredMasses(*(np.stack(x) for x in zip(*parts, strict=True)))
    return PageAudit(
        **describe_run(eval_model, texts, measured_versions(), source_digest(*SOURCES)),
        plan=candidate and candidate.identity,
        selector=type(selection.page_selector).__name__,
        budget=selection.budget,
        limit=getattr(selection, "limit", None),
        max_share=getattr(selection, "max_share", None),
        eps=settings.eps,
        context=settings.context,
        page_size=PAGE_SIZE,
        positions=len(positions),
        documents=tuple(document.name for document in windows.documents),
        notes=tuple(notes),
        total=summarize(measured, positions, settings.eps),
        by_position=summarize_spans(measured, positions, settings.context, settings.eps),
        heads=_audit_heads(measured, positions, settings.eps),
        seconds=time.monotonic() - start,
    )  # fmt: skip


def summarize_spans(
    measured: MeasuredMasses, positions: Int[np.ndarray, " P"], context: int, eps: float
) -> tuple[SpanAudit, ...]:
    """Summarize all heads by position in documents of `context` tokens; see `summarize`."""
    spans = []
    for span in position_spans(context):
        start = 0 if span.start == 1 else span.start
        chosen = (positions >= start) & (positions < span.end)
        if chosen.any():
            part = MeasuredMasses(*(x[:, :, chosen] for x in measured))
            result = summarize(part, positions[chosen], eps)
            spans.append(SpanAudit(start=start, end=span.end, **dict(result)))
    return tuple(spans)


def _audit_heads(
    measured: MeasuredMasses, positions: Int[np.ndarray, " P"], eps: float
) -> tuple[HeadAudit, ...]:
    """Summarize each query head."""
    certified, true, pages = measured
    pages = np.repeat(pages, true.shape[-1] // pages.shape[-1], axis=-1)
    heads = []
    for layer, head in np.ndindex(true.shape[1], true.shape[3]):
        part = (x[:, layer, :, head, None] for x in (certified, true, pages))
        result = summarize(MeasuredMasses(*part), positions, eps)
        heads.append(HeadAudit(layer=layer, head=head, **dict(result)))
    return tuple(heads)
