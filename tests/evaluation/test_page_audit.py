"""Audits of pages: the pages are those of decoding, the true mass is that of the definition."""

import dataclasses
import io
import json

import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from rich.console import Console

from tests.evaluation import sample
from xsake.attention import BlockSparseAttention
from xsake.cache import ForcedPages, Int8Keys, Quest
from xsake.errors import ArgumentError, UnsupportedError
from xsake.evaluation import (
    PageAudit,
    PageAuditSettings,
    UniformPages,
    audit_pages,
    audit_view,
    page_audit,
    write_report,
)
from xsake.evaluation.page_audit import choose_positions, make_query_hook, measure_document
from xsake.model.observer import Observer
from xsake.schemas import schema_text

FORCED = ForcedPages(1, 16)
SIZES = {"layers": 2, "q_heads": 4, "kv_heads": 2}
TEXTS = sample.texts(300, 100, 250)
POSITIONS = choose_positions(200, 20)


@dataclasses.dataclass
class Recorder:
    """Attention of steps that notes the pages that a selection chooses."""

    selection: UniformPages
    pages: list
    needs_layer_number = True  # layers one after the other, outside of a scan

    def __call__(self, q, k, v, call):
        self.pages.append(np.asarray(self.selection.retrieve(q[:, 0], call)))
        return call.apply(BlockSparseAttention(), q, k, v)


def measure(selection, model, tokens):
    inputs = Observer(model)(jnp.asarray(tokens)[None], make_query_hook(len(POSITIONS)))
    return inputs, measure_document(inputs, selection, POSITIONS, model.config.scale)


@pytest.mark.parametrize("selector", [Int8Keys(), Quest()])
def test_pages_and_masses_are_those_of_a_decoding_step(selector):
    model, tokens = sample.model(**SIZES), sample.encode(TEXTS.documents[0].text)[:200]
    selection = UniformPages(0.3, selector, FORCED)
    (q, k), measured = measure(selection, model, tokens)
    q, k = np.asarray(q, np.float64)[:, 0], np.asarray(k, np.float64)[:, 0]
    for number in (3, 9, 19):
        position = POSITIONS[number]
        _, cache = model.prefill(tokens[None, :position], np.array([position]), capacity=208)
        recorder = Recorder(selection, [])
        model.extend(tokens[None, position, None], cache.with_selector(selector), attend=recorder)
        for layer, pages in enumerate(recorder.pages):
            for head in range(4):
                s = k[layer, : position + 1, head // 2] @ q[layer, number, head]
                p = np.exp(model.config.scale * (s - s.max()))
                is_read = np.isin(np.arange(position + 1) // 16, pages[0, head // 2])
                dropped = p[~is_read].sum() / p.sum()
                np.testing.assert_allclose(measured.true[layer, number, head], dropped, atol=1e-14)
            np.testing.assert_array_equal(measured.pages[layer, number], (pages >= 0).sum(-1)[0])
    assert (measured.true <= measured.certified).all() and measured.true.max() > 0.01


def test_a_budget_of_every_page_drops_nothing():
    tokens = sample.encode(TEXTS.documents[0].text)[:200]
    _, measured = measure(UniformPages(1.0), sample.model(**SIZES), tokens)
    assert measured.true.max() == measured.certified.max() == 0
    np.testing.assert_array_equal(measured.pages[1, :, 0], POSITIONS // 16 + 1)


def test_the_report_counts_queries_and_matches_its_schema(tmp_path):
    seen = []
    settings = PageAuditSettings(200, positions=None, eps=0.05)
    selection = UniformPages(0.3, forced=FORCED)
    audit = audit_pages(
        sample.subject(model=sample.model(**SIZES)), TEXTS, selection, settings,
        on_progress=seen.append,
    )  # fmt: skip
    assert audit.total.queries == 2 * 2 * 4 * 200 and audit.total.violations == 0
    assert [(x.layer, x.head) for x in audit.heads] == [(i, j) for i in (0, 1) for j in range(4)]
    assert sum(x.queries for x in audit.heads) == audit.total.queries
    assert [(x.start, x.end) for x in audit.by_position] == [(0, 200)]
    mean = np.mean([x.true.mean for x in audit.heads])
    np.testing.assert_allclose(mean, audit.total.true.mean, rtol=1e-5)
    assert 0 < audit.total.true.mean < audit.total.certified.mean < audit.total.certified.max
    assert audit.total.certified.within <= audit.total.true.within < 1
    assert audit.notes[0] == "context 200: skipped documents with too few tokens: 1 of 3"
    assert [(x.done, x.total) for x in seen] == [(1, 2), (2, 2)] and "certified" in seen[0].detail
    path = tmp_path / "audit.json"
    write_report(audit, path)
    assert PageAudit.model_validate_json(path.read_text()) == audit
    jsonschema.validate(
        json.loads(path.read_text()), json.loads(schema_text("page_audit.schema.json"))
    )
    output = io.StringIO()
    Console(file=output, width=120).print(audit_view(audit))
    assert "All 3,200 certificates hold" in output.getvalue()
    assert f"{audit.total.pages:.1%} read" in output.getvalue()


def test_violations_are_counted():
    measured = page_audit.MeasuredMasses(
        np.array([0.0, 0.05, 0.2, 1.0], np.float32).reshape(1, 1, 4, 1),
        np.array([0.0, 0.06, 0.1, 0.3]).reshape(1, 1, 4, 1),
        np.array([1, 1, 2, 2]).reshape(1, 1, 4, 1),
    )
    result = page_audit.summarize(measured, np.array([3, 20, 40, 60]), 0.1)
    assert (result.queries, result.violations, result.pages) == (4, 1, 0.6)
    assert (result.certified.within, result.true.within) == (0.5, 0.75)
    assert (result.certified.max, result.true.max, result.true.median) == (1.0, 0.3, 0.08)


def test_what_cannot_be_audited_is_refused():
    for slug, settings in (
        ("audit-eps", {"eps": 0.0}),
        ("audit-positions", {"positions": 65}),
        ("audit-positions", {"positions": 0}),
    ):
        with pytest.raises(ArgumentError) as refusal:
            PageAuditSettings(64, **settings)
        assert refusal.value.slug == slug
    with pytest.raises(ArgumentError) as refusal:
        UniformPages(0.0)
    assert refusal.value.slug == "uniform-page-budget"
    capped = sample.subject(model=sample.model(attention_softcap=30.0))
    with pytest.raises(UnsupportedError) as refusal:
        audit_pages(capped, TEXTS, UniformPages(0.5), PageAuditSettings(64))
    assert refusal.value.slug == "certified-attention"
