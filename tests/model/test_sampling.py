"""Sampling rules against NumPy, and that no mixture of them leaves nothing or NaN."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xsake.model import sampling
from xsake.model.sampling import SamplingParams

VOCAB = 50
LOGITS = np.random.default_rng(0).normal(scale=3, size=(4, VOCAB)).astype(np.float32)


def kept(logits) -> list[set[int]]:
    """The tokens of each row that are not ruled out, after making sure that there is no NaN."""
    logits = np.asarray(logits)
    assert not np.isnan(logits).any()
    return [set(np.flatnonzero(row > -np.inf).tolist()) for row in logits]


def likeliest_first(row) -> np.ndarray:
    return np.lexsort((np.arange(len(row)), -row.astype(np.float64)))


def probabilities(row) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


@pytest.mark.parametrize("count", [1, 7, VOCAB, VOCAB + 9])
def test_top_k_keeps_exactly_k_and_changes_none_of_them(count):
    found = np.asarray(sampling.keep_top_k(jnp.asarray(LOGITS), count))
    for row, logits, tokens in zip(found, LOGITS, kept(found), strict=True):
        assert tokens == set(likeliest_first(logits)[:count].tolist())
        np.testing.assert_array_equal(row[list(tokens)], logits[list(tokens)])


def test_among_equals_top_k_keeps_those_of_lower_index():
    logits = jnp.array([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], [0.0] * 6])
    assert kept(sampling.keep_top_k(logits, 3)) == [{1, 3, 0}, {0, 1, 2}]


@pytest.mark.parametrize("mass", [1e-6, 0.3, 0.77, 0.99])
def test_top_p_keeps_the_smallest_set_that_reaches_p(mass):
    found = kept(sampling.keep_top_p(jnp.asarray(LOGITS), mass))
    for logits, tokens in zip(LOGITS, found, strict=True):
        order, shares = likeliest_first(logits), probabilities(logits)
        count = 1 + int((np.cumsum(shares[order]) < mass).sum())
        assert tokens == set(order[:count].tolist())
        assert shares[list(tokens)].sum() >= mass


def test_top_p_counts_exactly_and_takes_equals_by_index():
    logits = jnp.log(jnp.array([[0.25, 0.25, 0.25, 0.25], [0.1, 0.6, 0.2, 0.1]]))
    assert kept(sampling.keep_top_p(logits, 0.4)) == [{0, 1}, {1}]
    assert kept(sampling.keep_top_p(logits, 0.85)) == [{0, 1, 2, 3}, {0, 1, 2}]


def test_top_p_of_one_keeps_everything():
    logits = jnp.zeros((1, 49152)).at[0, 0].set(20.0)
    assert len(kept(sampling.keep_top_p(logits, 1.0))[0]) == 49152


@pytest.mark.parametrize("share", [1.0, 0.1, 0.003])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(share):
    found = kept(sampling.keep_min_p(jnp.asarray(LOGITS), share))
    for logits, tokens in zip(LOGITS, found, strict=True):
        shares = probabilities(logits)
        assert tokens == set(np.flatnonzero(shares >= share * shares.max()).tolist())


def test_temperature_divides():
    found = sampling.apply_temperature(jnp.asarray(LOGITS), 0.7)
    np.testing.assert_allclose(
        jax.nn.softmax(found), [probabilities(row / 0.7) for row in LOGITS], rtol=1e-5
    )


@pytest.mark.parametrize("temperature", [1e-30, 1e-300, 1e30])
def test_no_temperature_makes_nan(temperature):
    logits = jnp.asarray(LOGITS).at[:, 3].set(-jnp.inf)
    found = sampling.apply_temperature(logits, temperature)
    likeliest = np.asarray(logits).argmax(-1).tolist()
    assert all(token in tokens for token, tokens in zip(likeliest, kept(found), strict=True))
    assert np.isfinite(jax.nn.softmax(found)).all()


def test_the_repetition_penalty_lowers_seen_tokens_on_both_sides_of_zero():
    logits = jnp.array([[2.0, -2.0, 2.0, 0.0]])
    seen = jnp.array([[True, True, False, True]])
    assert sampling.apply_repetition_penalty(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, 0.0]]


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    row=st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.0, 1.0, -np.inf]),
        min_size=6, max_size=6,
    ).filter(lambda row: max(row) > -np.inf),
    temperature=st.floats(1e-6, 1e6),
    top_k=st.sampled_from([None, 1, 4, 9]),
    top_p=st.none() | st.floats(1e-9, 1),
    min_p=st.none() | st.floats(1e-9, 1),
)  # fmt: skip
def test_no_mixture_of_rules_rules_out_everything(row, **rules):
    with jax.disable_jit():
        logits = sampling.filter_logits(jnp.asarray([row], jnp.float32), SamplingParams(**rules))
    tokens = kept(logits)[0]
    assert int(np.argmax(np.float32(row))) in tokens
    assert np.isfinite(jax.nn.softmax(logits)).all()


def test_rules_apply_to_what_the_ones_before_left():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    # Of the two that top_k leaves, the first alone has 4/7 of the probability.
    for top_k, expected in ((2, {0}), (None, {0, 1})):
        rules = SamplingParams(temperature=1, top_k=top_k, top_p=0.55)
        assert kept(sampling.filter_logits(logits, rules)) == [expected]


def test_draws_follow_the_distribution():
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    many = jnp.broadcast_to(jnp.log(jnp.asarray(shares, jnp.float32))[None], (4000, 4))
    drawn = sampling.sample_tokens(many, SamplingParams(temperature=1), key=jax.random.key(0))
    surprise = np.bincount(drawn, minlength=4) - 4000 * shares
    assert (np.abs(surprise) < 4 * np.sqrt(4000 * shares * (1 - shares))).all()


def test_draws_depend_on_key_row_and_step_and_not_on_the_number_of_rows():
    flat = jnp.zeros((64, 1000))
    draw = lambda seed, step, rows=64: sampling.sample_tokens(
        flat[:rows], SamplingParams(temperature=1), key=jax.random.key(seed), step=step
    ).tolist()
    assert draw(0, 0) == draw(0, 0)
    assert draw(0, 0)[:5] == draw(0, 0, rows=5)
    assert len(set(draw(0, 0))) > 50
    for other in (draw(1, 0), draw(0, 1)):
        assert np.mean(np.equal(draw(0, 0), other)) < 0.1


def test_greedy_takes_the_likeliest_whatever_else_is_asked():
    rules = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.2)
    found = sampling.sample_tokens(jnp.asarray(LOGITS), rules, key=jax.random.key(0))
    assert found.tolist() == LOGITS.argmax(-1).tolist()
