"""Scores against plain float64 NumPy, and that how they are computed does not show in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluation import sample
from xsake.errors import ArgumentError
from xsake.evaluation.score import Scorer, Scores, compare, score_chunks
from xsake.evaluation.trial import TokenSpan, position_spans
from xsake.masks import Causal, Sinks, Window
from xsake.model import MaskedAttention

TOKENS = np.random.default_rng(0).integers(0, 256, 100).astype(np.int32)
NEAR = MaskedAttention(Window(15, 0) | Sinks(2))


def log_softmax(logits) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def scorer():
    return Scorer(sample.model(), NEAR, chunk=32)


@pytest.fixture(scope="module")
def scores(scorer):
    return scorer(TOKENS)


@pytest.fixture(scope="module")
def truth(scorer):
    """Float64 log-probabilities of dense and of windowed attention, and the tokens to predict."""
    model = sample.model()
    weight = np.asarray(model.embedding[...], np.float64)
    hidden = [np.asarray(read(model, TOKENS[None]), np.float64) for read in scorer._sides]
    dense, near = (log_softmax(side @ weight.T) for side in hidden)
    return dense, near, TOKENS[1:]


def test_nll_is_that_of_a_plain_log_softmax(truth, scores):
    dense, near, targets = truth
    rows = np.arange(len(targets))
    np.testing.assert_allclose(scores.dense_nll, -dense[rows, targets], rtol=2e-6)
    np.testing.assert_allclose(scores.candidate_nll, -near[rows, targets], rtol=2e-6)


def test_divergence_and_agreement_are_those_of_numpy(truth, scores):
    dense, near, _ = truth
    kl = (np.exp(dense) * (dense - near)).sum(-1)
    assert kl[20:].min() > 1e-4
    np.testing.assert_allclose(scores.kl, kl, rtol=1e-4, atol=2e-6)
    agreement = dense.argmax(-1) == near.argmax(-1)
    assert 0 < agreement.mean() < 1
    np.testing.assert_array_equal(scores.agreement, agreement)


def in_chunks_of(chunk):
    """Scores of hidden states that no attention has to be compiled for."""
    hidden = jax.random.normal(jax.random.key(0), (2, 99, 48))
    return score_chunks(
        sample.model(), (hidden[0], hidden[1]), jnp.asarray(TOKENS[1:]), chunk=chunk
    )


@pytest.mark.parametrize("chunk", [1, 32, 99])
def test_chunks_do_not_change_a_score(chunk):
    for found, expected in zip(in_chunks_of(chunk), in_chunks_of(256), strict=True):
        assert found.shape == (99,)
        np.testing.assert_allclose(found, expected, atol=5e-6)


def test_a_candidate_equal_to_dense_diverges_by_nothing():
    scores = Scorer(sample.model(), MaskedAttention(Causal()))(TOKENS)
    assert scores.kl.max() == 0 and scores.agreement.all()
    np.testing.assert_array_equal(scores.dense_nll, scores.candidate_nll)


def test_dense_alone_has_nothing_to_compare():
    alone = score_chunks(sample.model(), (jnp.ones((99, 48)),), jnp.asarray(TOKENS[1:]), chunk=32)
    assert set(Scores(*map(np.asarray, alone)).sums((TokenSpan(1, 100),))) == {"dense_nll"}


def test_the_logits_of_a_whole_sequence_never_exist_at_once():
    vocab, tokens = 4096, 2048
    wide = sample.model(vocab_size=vocab)
    hidden = jax.ShapeDtypeStruct((tokens, 48), jnp.float32)
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    lowered = score_chunks.lower(wide, (hidden, hidden), targets, chunk=64)
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * tokens * vocab / 3


@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([1e-6, 1e-3, 1.0, 30.0]))
def test_divergence_is_never_negative(seed, spread):
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(4, 16)) * 5
    other = dense + spread * rng.normal(size=(4, 16))
    targets = np.zeros(4, np.int32)
    _, _, kl, _ = compare([jnp.float32(dense), jnp.float32(other)], jnp.asarray(targets))
    assert (np.asarray(kl) >= 0).all() and np.isfinite(kl).all()


def test_sums_are_over_the_predicted_positions(scores):
    spans = (TokenSpan(1, 3), TokenSpan(10, 100))
    first, second = scores.sums(spans)["dense_nll"]
    assert first == pytest.approx(scores.dense_nll[:2].sum(), rel=1e-6)
    assert second == pytest.approx(scores.dense_nll[9:].sum(), rel=1e-6)


def test_positions_double_and_leave_none_out():
    spans = position_spans(8192)
    assert [str(span) for span in spans] == [
        "0-512", "512-1024", "1024-2048", "2048-4096", "4096-8192",
    ]  # fmt: skip
    assert position_spans(300) == (TokenSpan(1, 300),)
    assert position_spans(512) == (TokenSpan(1, 512),)
    assert sum(end - start for start, end in position_spans(5000)) == 4999


def test_numbers_that_are_not_finite_are_refused():
    broken = jax.tree.map(lambda x: x * jnp.nan, sample.model())
    with pytest.raises(ArgumentError, match="XSK-102.non-finite-predictions"):
        Scorer(broken)(TOKENS)
