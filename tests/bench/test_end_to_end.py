"""Losses by document: their means, the parts of positions, and the tables made of them."""

import json

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.hads.compare import PARTS, ModelComparison, summarize
from benchmarks.pages import evidence
from xsake.evaluation import Scorer
from xsake.masks import Window
from xsake.model import Decoder, DecoderConfig, MaskedAttention


def losses(nll, kl, tokens=100):
    part = {"tokens": tokens, "dense_nll": 2.0, "nll": nll, "kl": kl, "agreement": 0.9}
    return dict.fromkeys(PARTS, part)


def test_scores_of_a_document_are_those_of_the_package():
    model = Decoder(DecoderConfig.tiny(), rngs=nnx.Rngs(0))
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (300,), 0, 90))
    attend = MaskedAttention(Window(left=30, right=0))
    comparison = ModelComparison(model)
    comparison.add("window", attend)
    comparison.add("layer by layer", attend, is_compiled=False)
    found = comparison.losses("window", tokens)
    scores = Scorer(model, attend)(tokens)
    for part, first in (("all", 0), ("second_half", 149), ("last_quarter", 224)):
        assert found[part]["tokens"] == 299 - first
        for name, truth in (("nll", scores.candidate_nll), ("kl", scores.kl)):
            assert found[part][name] == pytest.approx(truth[first:].mean(), rel=1e-4, abs=1e-6)
    again = comparison.losses("layer by layer", tokens)["all"]["nll"]
    assert again == pytest.approx(found["all"]["nll"], rel=1e-4)


def test_means_weigh_documents_by_their_tokens():
    summary = summarize([losses(2.2, 0.1, 300), losses(2.0, 0.5, 100)])
    assert summary["documents"] == 2
    assert summary["kl"]["value"] == pytest.approx(0.2)
    assert summary["perplexity_gap"]["value"] == pytest.approx(np.exp(0.15) - 1)
    assert summary["kl"]["low"] <= 0.2 <= summary["kl"]["high"]


def test_a_ladder_counts_the_documents_that_every_rule_has(tmp_path):
    (tmp_path / "hads").mkdir()
    row = {"model": evidence.SMOLLM2, "work": 0.3, "context": 4096, "measured_work": 0.3}
    rows = [
        row | {"side": side, "document": document, "losses": losses(2.1, kl)}
        for side, document, kl in (
            ("hads", "a", 0.01), ("hads", "b", 5.0), ("quest", "a", 0.02), ("hads", "c", 0.03),
            ("quest", "c", 0.04),
        )
    ]  # fmt: skip
    rows[2] |= {"measured_work": 0.4}
    text = "".join(json.dumps(x) + "\n" for x in rows)
    (tmp_path / "hads" / "end_to_end.jsonl").write_text(text)
    table = evidence.tables(tmp_path)["ladder 4096"]
    assert "4096 tokens, 2 documents" in table
    assert "| **hads, policy `effect`** | 0.0200, 0.0200; +10.5% |" in table
    assert "0.0300, 0.0300; +10.5% (at 35.0%)" in table
